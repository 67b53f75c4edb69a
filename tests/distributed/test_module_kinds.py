"""`ShardedPlanner` on modules of every kind: trained on ranks as they train on one."""

import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_sharded import ShardedPlanner
from dlrm_sharded.plans.layouts import ColumnShards, RowBlocks
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.base import Sharder
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.sharders.torchrec import TorchRecSharder
from tests.distributed.module_kinds import (
    KINDS,
    LEARNING_RATE,
    Kind,
    Model,
    bags,
    every_id,
    features,
)
from tests.distributed.torchrec_modules import LaidOut, OnlyReplicas, local_weights
from tests.preloaded.ranks import gathered, run_ranks

pytestmark = pytest.mark.slow

NUM_STEPS = 3
PAGE = Path(__file__).parents[2] / "docs/guide/torchrec.md"


def rows_but_of_the_first(table: Table, i: int, world_size: int) -> list[Shard]:
    """Splits by rows what it may, except the first table."""
    if i and "rows" in table.layouts:
        return RowBlocks(range(world_size)).shards(table)
    return [Shard.whole(table, 0)]


def columns_but_of_some(table: Table, i: int, world_size: int) -> list[Shard]:
    """Splits bags into 4 columns and the others where it may, except every third table."""
    if i % 3 != 1 and table.pooled and "columns" in table.layouts:
        return ColumnShards.shards(table, [(1, 4), (0, table.embedding_dim - 4)])
    return [Shard.whole(table, i % world_size)]


SHARDERS: dict[str, Callable[[], Sharder]] = {
    "dim": lambda: GreedySharder("dim"),
    "columns": lambda: LaidOut(columns_but_of_some),
    "torchrec_full": lambda: TorchRecSharder(full=True, min_partition=4),
    "rows": lambda: LaidOut(rows_but_of_the_first),
}
"""For whole tables, column shards, any layouts with replicas where these may be, and row blocks."""

PINNED = ParameterConstraints(sharding_types=["data_parallel"])
REPLICATED: dict[str, Kind] = {
    "half": Kind(
        lambda: Model(bags()), options={"dim": {"constraints": {"t1": PINNED, "t3": PINNED}}}
    ),
    "half, by the mean": Kind(
        lambda: Model(bags(means=[1, 3])),
        rule=(RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2}),
        options={"dim": {"constraints": {"t1": PINNED, "t3": PINNED}}},
    ),
    "all": Kind(lambda: Model(bags()), rule=(RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2})),
}
"""Models of which some tables are replicated by their constraints, or all by the only type that
their sharder offers."""


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
    fused = {name: parameters[name] for name in names if name in parameters}
    if kind.fuse is not None:
        kind.fuse(fused)
    else:
        apply_optimizer_in_backward(kind.rule[0], fused.values(), dict(kind.rule[1]))
    return [weight for name, weight in parameters.items() if name not in names]


def train_sharded(rank: Rank, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """Largest difference from training alone, change of each table and sharding types, by case."""
    kinds = KINDS | REPLICATED
    return {f"{kind}-{name}": _train(rank, kinds[kind], name) for kind, name in cases}


def _train(rank: Rank, kind: Kind, name: str) -> dict[str, Any]:
    alone, model = make(kind), make(kind)
    sharders: Any = [OnlyReplicas()] if kind is REPLICATED["all"] else get_default_sharders()
    before = {name: weight.clone() for name, weight in tables(alone).items()}
    dense = fuse(kind, alone)
    fuse(kind, model)
    planner = ShardedPlanner(SHARDERS[name](), **kind.options.get(name, {}))
    plan = planner.collective_plan(model, sharders)
    assert planner.report is not None
    sharded = DistributedModelParallel(model, plan=plan, sharders=sharders, device=rank.device)
    for _ in range(NUM_STEPS * (kind.batches == "few_ids")):
        with torch.no_grad():
            alone(every_id()), sharded(every_id().to(rank.device))
    for name, place, weight in local_weights(tables(sharded)):
        weight.copy_(before[name][place])
    sharded_dense = [w for n, w in sharded.named_parameters() if plain(n) not in before]
    optimizers = [torch.optim.SGD(w, lr=LEARNING_RATE) for w in (dense, sharded_dense) if w]
    if kind in REPLICATED.values():
        replicas = [w for _, w in in_backward_optimizer_filter(sharded.named_parameters())]
        optimizers.append(kind.rule[0](replicas, **kind.rule[1]))
    output_error = 0.0
    for step in range(NUM_STEPS):
        outputs = [alone(features(kind.batches, step, r)) for r in range(rank.world_size)]
        (sum(o.square().sum() for o in outputs) / rank.world_size).backward()
        output = sharded(features(kind.batches, step, rank.rank).to(rank.device))
        output.square().sum().backward()
        output_error = max(output_error, _distance(output, outputs[rank.rank]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = tables(alone)
    error, change = dict.fromkeys(before, 0.0), dict.fromkeys(before, 0.0)
    for name, place, weight in local_weights(tables(sharded)):
        error[name] = max(error[name], _distance(weight, after[name][place]))
        change[name] = max(change[name], _distance(weight, before[name][place]))
    by_rank = gathered(rank, (error, change, output_error))
    lies = [(rank.rank, *place) for _, place, _ in local_weights(tables(sharded))]
    return {
        "error": max(max(e.values()) for e, _, _ in by_rank),
        "output_error": max(o for _, _, o in by_rank),
        "least_change": min(max(c[name] for _, c, _ in by_rank) for name in before),
        "planned": Counter((s.rank, s.rows, s.cols) for s in planner.report.plan.shards),
        "lies": Counter(
            (number, *((bounds.start, bounds.stop) for bounds in place))
            for of_rank in gathered(rank, lies)
            for number, *place in of_rank
        ),
        "num_tables": len(before),
        "precisions": {weight.dtype for *_, weight in local_weights(tables(sharded))},
        "types": Counter(p.sharding_type for part in plan.plan.values() for p in part.values()),
        "report": str(planner.report),
    }


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.cpu() - other).abs().max()) if one.numel() else 0.0


CASES = [
    *((kind, name) for kind in KINDS for name in ("columns", "rows")),
    *((kind, name) for kind in ("bags", "sequences") for name in ("dim", "torchrec_full")),
    *((kind, "dim") for kind in REPLICATED),
]


@functools.cache
def results() -> dict[str, Any]:
    """All cases in one start of the processes."""
    return run_ranks(train_sharded, 2, CASES)


@pytest.mark.parametrize(("of", "name"), CASES)
def test_trains_as_alone(of, name):
    """The tables lie where a plan of this sharder has them."""
    result, kind = results()[f"{of}-{name}"], (KINDS | REPLICATED)[of]
    num_replicated = (4 if of == "all" else 2) * (of in REPLICATED)
    assert result["types"]["data_parallel"] == num_replicated
    assert (f"{num_replicated} of them replicated (the dense optim" in result["report"]) == (
        of in REPLICATED
    )
    assert result["lies"] == result["planned"]
    assert {rank for rank, *_ in result["lies"]} >= {0, 1}
    is_split = result["planned"].total() > result["num_tables"]
    if name == "columns":
        assert is_split or {*result["types"]} == {"table_wise"}
    assert name != "rows" or "row_wise" in result["types"]
    assert name == "dim" or name not in kind.options or {*result["types"]} == {"row_wise"}
    assert result["precisions"] == {kind.precision}
    assert result["least_change"] > 1e-3, "a table did not train"
    assert result["output_error"] < kind.tolerance
    if kind.compares_tables:
        assert result["error"] < kind.tolerance
    else:
        assert {*result["types"]} == {"row_wise"}


def test_the_page_of_modules_lists_these_kinds():
    assert re.findall(r"^\| (.+?) \| trains", PAGE.read_text(), re.MULTILINE) == [*KINDS]
