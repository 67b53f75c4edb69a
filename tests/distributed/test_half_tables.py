"""Tables in fp16 train, and go on from checkpoints in either precision."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.manifest import RunState, read_manifest
from dlrm_sharded.checkpoint.model_state import model_state
from dlrm_sharded.checkpoint.restore import load_model, load_weights
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.model.dlrm import dlrm
from dlrm_sharded.model.sharded_model import shard_model
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.small_model import (
    LOCAL_BATCH_SIZE,
    TABLES,
    global_batches,
    local_shards,
    make_plan,
    optimizers,
    share,
)
from tests.distributed.test_sharded_equals_unsharded import initial_tables
from tests.preloaded.ranks import gathered, run_ranks

HALF = ("a", "c")
"""Tables in fp16, beside one in fp32."""

EMBEDDING = "rowwise_adagrad"


def plan_of(kind: str, world_size: int, names: tuple[str, ...]) -> ShardingPlan:
    plan = make_plan(kind, world_size)
    shards = (
        dataclasses.replace(s, precision="fp16") if s.table in names else s for s in plan.shards
    )
    return dataclasses.replace(plan, shards=tuple(shards))


def built(rank: Rank, kind: str, names: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """The sharded model with some tables in fp16, its optimizer and its state."""
    topology = Topology(rank.world_size, 10**9, compute_device=rank.device.type)
    plan = plan_of(kind, rank.world_size, names)
    task = ShardingTask(TABLES, topology, LOCAL_BATCH_SIZE * rank.world_size)
    validate(plan, task)
    tables = with_precisions(task, plan).tables
    torch.manual_seed(0)
    model = dlrm(tables, 3, dense_layers=[8, 8], over_layers=[8, 1], device=rank.device)
    config = optimizers(EMBEDDING)
    config.fuse_into(model)
    sharded = shard_model(model, plan, tables, topology, seed=7)
    optimizer = config.build(sharded)
    state = model_state(sharded, optimizer, plan, tables, embedding_optimizer=EMBEDDING)
    return sharded, optimizer, state


def trained(rank: Rank, sharded: Any, optimizer: Any) -> torch.Tensor:
    logits = []
    for batch in global_batches(rank.world_size):
        optimizer.zero_grad()
        loss, (_, step_logits, _) = sharded(share(batch, rank.rank))
        loss.backward()
        optimizer.step()
        assert step_logits.dtype == torch.float32
        logits.append(step_logits.detach())
    return torch.cat(gathered(rank, torch.stack(logits)), dim=1)


def train_in_both(rank: Rank, kinds: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind in kinds:
        for names in ((), HALF):
            sharded, optimizer, _ = built(rank, kind, names)
            before = gathered(rank, local_shards(sharded))
            logits = trained(rank, sharded, optimizer)
            after = gathered(rank, local_shards(sharded))
            results[f"{kind}-{len(names)}"] = {
                "initial": initial_tables(rank.device),
                "before": [shard for shards in before for shard in shards],
                "after": [shard for shards in after for shard in shards],
                "logits": logits,
            }
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trains_within_rounding(world_size: int) -> None:
    kinds = ["columns_uneven", "row_wise", "rows_and_columns"]
    results = run_ranks(train_in_both, world_size, kinds)
    for kind in kinds:
        exact, found = results[f"{kind}-0"], results[f"{kind}-2"]
        torch.testing.assert_close(found["logits"], exact["logits"], rtol=0.01, atol=0.01)
        for name, (row, col), weights in found["before"]:
            initial = found["initial"][name][row : row + len(weights), col : col + weights.shape[1]]
            assert weights.dtype == (torch.float16 if name in HALF else torch.float32)
            torch.testing.assert_close(weights, initial.to(weights.dtype), rtol=0.0, atol=0.0)
        for before, after, in_fp32 in zip(
            found["before"], found["after"], exact["after"], strict=True
        ):
            assert after[:2] == in_fp32[:2]
            assert not torch.equal(before[2], after[2]), after[0]
            torch.testing.assert_close(after[2].float(), in_fp32[2], rtol=0.01, atol=0.01)


def save_and_load(rank: Rank, folder: str, written: tuple[str, ...]) -> dict[str, Any]:
    """Write a checkpoint after training and read it in the other precisions of tables."""
    sharded, optimizer, state = built(rank, "columns_uneven", written)
    trained(rank, sharded, optimizer)
    saver = Saver(Path(folder), keep=2, background=False, rank=rank)
    saver.save(
        state.tensors,
        RunState(
            run="r",
            step=3,
            batch_size=12,
            seed=0,
            epoch_batches=3,
            world_size=rank.world_size,
            optimizers={"embedding": EMBEDDING, "dense": "sgd"},
            column_bounds=state.column_bounds,
            progress={},
            plan={},
            config={},
        ),
    )
    saver.close()
    assert saver.failure is None, saver.failure
    (path,) = checkpoints(Path(folder))
    manifest = read_manifest(path)
    result: dict[str, Any] = {
        "dtypes": {t.name: manifest.tensors[f"tables.{t.name}.weight"].dtype for t in TABLES},
        "written": [s for shards in gathered(rank, local_shards(sharded)) for s in shards],
    }
    for key, load in (("model", load_model), ("weights", load_weights)):
        others = tuple({t.name for t in TABLES} - set(written))
        loaded, _, to = built(rank, "row_wise", others)
        load(manifest, to)
        result[key] = [s for shards in gathered(rank, local_shards(loaded)) for s in shards]
    return result


@pytest.mark.parametrize("written", [(), HALF], ids=["from_fp32", "from_fp16"])
def test_checkpoints_load_in_other_precisions(tmp_path: Path, written: tuple[str, ...]) -> None:
    result = run_ranks(save_and_load, 2, str(tmp_path), written)
    for name, dtype in result["dtypes"].items():
        assert dtype == ("float16" if name in written else "float32")
    whole = {t.name: torch.zeros(t.num_embeddings, t.embedding_dim) for t in TABLES}
    for name, (row, col), weights in result["written"]:
        whole[name][row : row + len(weights), col : col + weights.shape[1]] = weights.float()
    for key in ("model", "weights"):
        assert result[key]
        for name, (row, col), weights in result[key]:
            expected = whole[name][row : row + len(weights), col : col + weights.shape[1]]
            assert weights.dtype == (torch.float32 if name in written else torch.float16)
            torch.testing.assert_close(weights, expected.to(weights.dtype), rtol=0.0, atol=0.0)
