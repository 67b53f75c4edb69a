"""`ShardedPlanner` on modules of every kind: trained on ranks as they train on one."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from dlrm_sharded import ShardedPlanner, Topology
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.baselines.halving import HalvingSharder
from dlrm_sharded.sharders.baselines.torchrec import TorchRecSharder
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.module_kinds import KINDS, LEARNING_RATE, REFUSED, Kind, every_id, features
from tests.distributed.torchrec_modules import LaidOut
from tests.preloaded.ranks import gathered, run_ranks

NUM_STEPS = 3
PAGE = Path(__file__).parents[2] / "docs/reference/modules.md"


def rows_but_of_the_first(table: Table, i: int, world_size: int) -> list[Shard]:
    """Splits by rows what it may, except the first table."""
    if i and "rows" in table.layouts:
        return RowBlocks(range(world_size)).shards(table)
    return [Shard.whole(table, 0)]


SHARDERS: dict[str, Callable[[], Sharder]] = {
    "dim": lambda: GreedySharder("dim"),
    "hugectr": lambda: HalvingSharder("hugectr", min_partition=4),
    "torchrec_dp": lambda: TorchRecSharder(full=True, replicate=True, min_partition=4),
    "rows": lambda: LaidOut(rows_but_of_the_first),
}
"""One for whole tables, two that split and replicate where they may, and one for row blocks."""


def tables(model: nn.Module) -> dict[str, Any]:
    """The tables of an unsharded model, or their parts in a sharded one, by their path."""
    return {
        plain(name): weight
        for name, weight in model.state_dict().items()
        if "embedding_bags." in name or "embeddings." in name
    }


def plain(name: str) -> str:
    """The name of a parameter without what the wrappers of a sharded model add to it."""
    return ".".join(p for p in name.split(".") if p not in ("module", "_dmp_wrapped_module"))


def make(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    return kind.make()


def fuse(kind: Kind, model: nn.Module) -> list[nn.Parameter]:
    """Attach the fused optimizers; return the parameters that have none."""
    names = tables(model).keys()
    parameters = dict(model.named_parameters())
    kind.fuse({name: parameters[name] for name in names if name in parameters})
    return [weight for name, weight in parameters.items() if name not in names]


def train_sharded(rank: Rank, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """Largest difference from training alone, change of each table and sharding types, by case."""
    return {f"{kind}-{name}": _train(rank, KINDS[kind], SHARDERS[name]()) for kind, name in cases}


def _train(rank: Rank, kind: Kind, sharder: Sharder) -> dict[str, Any]:
    alone, model = make(kind), make(kind)
    before = {name: weight.clone() for name, weight in tables(alone).items()}
    dense = fuse(kind, alone)
    fuse(kind, model)
    plan = ShardedPlanner(sharder).collective_plan(model, kind.sharders())
    sharded = DistributedModelParallel(
        model, plan=plan, sharders=kind.sharders(), device=rank.device
    )
    for _ in range(NUM_STEPS * (kind.batches == "few_ids")):
        with torch.no_grad():
            alone(every_id()), sharded(every_id())
    for name, place, weight in _local(sharded):
        weight.copy_(before[name][place])
    sharded_dense = [w for n, w in sharded.named_parameters() if plain(n) not in before]
    optimizers = [torch.optim.SGD(w, lr=LEARNING_RATE) for w in (dense, sharded_dense) if w]
    output_error = 0.0
    for step in range(NUM_STEPS):
        outputs = [alone(features(kind.batches, step, r)) for r in range(rank.world_size)]
        (sum(o.square().sum() for o in outputs) / rank.world_size).backward()
        output = sharded(features(kind.batches, step, rank.rank))
        output.square().sum().backward()
        output_error = max(output_error, _distance(output, outputs[rank.rank]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = tables(alone)
    error, change = dict.fromkeys(before, 0.0), dict.fromkeys(before, 0.0)
    for name, place, weight in _local(sharded):
        error[name] = max(error[name], _distance(weight, after[name][place]))
        change[name] = max(change[name], _distance(weight, before[name][place]))
    by_rank = gathered(rank, (error, change, output_error))
    return {
        "error": max(max(e.values()) for e, _, _ in by_rank),
        "output_error": max(o for _, _, o in by_rank),
        "least_change": min(max(c[name] for _, c, _ in by_rank) for name in before),
        "types": sorted({p.sharding_type for part in plan.plan.values() for p in part.values()}),
    }


def _local(sharded: nn.Module) -> list[tuple[str, tuple[slice, ...], Tensor]]:
    """Path of the table, place in it and weights of each shard of this rank, and of replicas."""
    found: list[tuple[str, tuple[slice, ...], Tensor]] = []
    for name, weight in tables(sharded).items():
        if not isinstance(weight, ShardedTensor):
            found.append((name, (slice(None), slice(None)), weight))
            continue
        for shard in weight.local_shards():
            bounds = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            found.append((name, tuple(slice(s, s + n) for s, n in bounds), shard.tensor))
    return found


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) if one.numel() else 0.0


CASES = [
    *((kind, name) for kind in KINDS for name in ("hugectr", "rows")),
    *((kind, name) for kind in ("bags", "sequences") for name in ("dim", "torchrec_dp")),
]
ON_THREE = [
    (kind, "rows") for kind in ("several modules", "managed collisions of bags", "sequences")
]


@functools.cache
def results(world_size: int) -> dict[str, Any]:
    """All cases in one start of the processes."""
    return run_ranks(train_sharded, world_size, [*CASES] if world_size == 2 else [*ON_THREE])


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_trains_as_alone(kind, name):
    _check(results(2)[f"{kind}-{name}"], KINDS[kind])


@pytest.mark.parametrize(("kind", "name"), ON_THREE)
def test_trains_as_alone_on_three_ranks(kind, name):
    _check(results(3)[f"{kind}-{name}"], KINDS[kind])


def _check(result: dict[str, Any], kind: Kind) -> None:
    assert "data_parallel" not in result["types"]
    assert result["least_change"] > 1e-3, "a table did not train"
    assert result["output_error"] < kind.tolerance
    if kind.compares_tables:
        assert result["error"] < kind.tolerance
    else:
        assert result["types"] == ["row_wise"]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_torchrec_does_not_train_on_cpus_is_refused_before_building(kind):
    """The message names the module, the table and the reason."""
    planner = ShardedPlanner(
        GreedySharder("dim"), topology=Topology(2, 10**9, compute_device="cpu")
    )
    with pytest.raises(ConfigError, match=r"^table '.*' of module 'parts.0' \(.*Error: .*; "):
        planner.plan(make(REFUSED[kind]), REFUSED[kind].sharders())


def test_the_page_of_modules_lists_these_kinds():
    rows = re.findall(r"^\| (.+?) \| (trains|refused)", PAGE.read_text(), re.MULTILINE)
    assert [kind for kind, verdict in rows if verdict == "trains"] == [*KINDS]
    assert [kind for kind, verdict in rows if verdict == "refused"] == [*REFUSED]
