"""Tables in fp16 train, and go on from checkpoints in either precision."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.checkpoint.model_state import model_state
from dlrm_sharded.checkpoint.restore import load_model, load_weights
from dlrm_sharded.model.dlrm import dlrm
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.small_model import (
    LOCAL_BATCH_SIZE,
    TABLES,
    A,
    C,
    all_shards,
    make_plan,
    optimizers,
    shard,
    trained_logits,
)
from tests.distributed.test_sharded_equals_unsharded import initial_tables
from tests.preloaded.ranks import run_ranks
from tests.unit.checkpoint.cases import write

pytestmark = pytest.mark.slow

HALF = (A, C)
"""Tables in fp16, beside one in fp32."""

EMBEDDING = "rowwise_adagrad"


def plan_of(kind: str, world_size: int, names: tuple[str, ...]) -> ShardingPlan:
    plan = make_plan(kind, world_size)
    shards = (
        dataclasses.replace(s, precision="fp16") if s.table in names else s for s in plan.shards
    )
    return dataclasses.replace(plan, shards=tuple(shards))


def built(
    rank: Rank, kind: str, names: tuple[str, ...], embedding: str = EMBEDDING
) -> tuple[Any, Any, Any]:
    """The sharded model with some tables in fp16, its optimizer and its state."""
    plan = plan_of(kind, rank.world_size, names)
    task = ShardingTask(TABLES, Topology(rank.world_size, 10**9), LOCAL_BATCH_SIZE)
    tables = with_precisions(task, plan).tables
    torch.manual_seed(0)
    model = dlrm(tables, 3, dense_layers=[8, 8], over_layers=[8, 1], device=rank.device)
    sharded, optimizer = shard(rank, model, plan, optimizers(embedding), tables)
    state = model_state(sharded, optimizer, plan, tables, embedding_optimizer=embedding)
    return sharded, optimizer, state


def train_in_both(rank: Rank, kinds: list[str], embedding: str = EMBEDDING) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind in kinds:
        for names in ((), HALF):
            sharded, optimizer, _ = built(rank, kind, names, embedding)
            results[f"{kind}-{len(names)}"] = {
                "initial": initial_tables(rank.device),
                "before": all_shards(rank, sharded),
                "logits": trained_logits(rank, sharded, optimizer),
                "after": all_shards(rank, sharded),
            }
    return results


@pytest.mark.parametrize("embedding", [EMBEDDING, "elementwise_adagrad"])
def test_trains_within_rounding(embedding):
    kinds = ["columns_uneven", "row_wise", "rows_and_columns"]
    check_within_rounding(run_ranks(train_in_both, 2, kinds, embedding), kinds)


def check_within_rounding(results: dict[str, Any], kinds: list[str]) -> None:
    for kind in kinds:
        exact, found = results[f"{kind}-0"], results[f"{kind}-2"]
        assert found["logits"].dtype == torch.float32
        torch.testing.assert_close(found["logits"], exact["logits"], rtol=0.01, atol=0.01)
        for name, place, weights in found["before"]:
            initial = found["initial"][name][place]
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
    trained_logits(rank, sharded, optimizer)
    bounds = state.column_bounds
    path = write(Path(folder), rank, state=state.tensors, column_bounds=bounds)
    manifest = read_manifest(path)
    result: dict[str, Any] = {
        "dtypes": {t.name: manifest.tensors[f"tables.{t.name}.weight"].dtype for t in TABLES},
        "written": all_shards(rank, sharded),
    }
    for key, load in (("model", load_model), ("weights", load_weights)):
        others = tuple({t.name for t in TABLES} - set(written))
        loaded, _, to = built(rank, "row_wise", others)
        load(manifest, to)
        result[key] = all_shards(rank, loaded)
    return result


@pytest.mark.parametrize("written", [(), HALF], ids=["from_fp32", "from_fp16"])
def test_checkpoints_load_in_other_precisions(tmp_path, written):
    check_loaded(run_ranks(save_and_load, 2, str(tmp_path), written), written)


def check_loaded(result: dict[str, Any], written: tuple[str, ...]) -> None:
    for name, dtype in result["dtypes"].items():
        assert dtype == ("float16" if name in written else "float32")
    whole = {t.name: torch.zeros(t.num_embeddings, t.embedding_dim) for t in TABLES}
    for name, place, weights in result["written"]:
        whole[name][place] = weights.float()
    for key in ("model", "weights"):
        assert result[key]
        for name, place, weights in result[key]:
            expected = whole[name][place]
            assert weights.dtype == (torch.float32 if name in written else torch.float16)
            torch.testing.assert_close(weights, expected.to(weights.dtype), rtol=0.0, atol=0.0)
