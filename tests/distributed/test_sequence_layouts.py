"""Sequences train as in an unsharded model, under every layout that they can have on CPUs."""

import functools
from typing import Any

import pytest

from dlrm_sharded.plans.layouts import SEQUENCE_LAYOUTS, layout_name
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import Topology
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.sequence_layouts import DIM, LAYOUTS, REPLICATED, ROWS, train
from tests.preloaded.ranks import run_ranks

pytestmark = pytest.mark.slow

RULES = ("sgd", "rowwise_adagrad")
CASES = [
    (world_size, layout, rule) for world_size in (1, 2, 3) for layout in LAYOUTS for rule in RULES
]


def train_all(rank: Rank) -> dict[str, Any]:
    return {
        f"{layout}-{rule}": train(rank, layout, rule)
        for world_size, layout, rule in CASES
        if world_size == rank.world_size
    }


def train_densely(rank: Rank) -> str:
    try:
        train(rank, "whole", "dense_adam")
    except RuntimeError as error:
        return str(error)
    return ""


@functools.cache
def results(world_size: int) -> dict[str, Any]:
    """All cases in one start of the processes."""
    return dict(run_ranks(train_all, world_size))


@pytest.mark.parametrize(("world_size", "layout", "rule"), CASES)
def test_sequences_train_as_alone(world_size: int, layout: str, rule: str) -> None:
    check(results(world_size)[f"{layout}-{rule}"], layout, world_size)


def test_the_dense_lookup_pools_sequences_on_cpus() -> None:
    """Adam is outside of that lookup here, as FBGEMM fuses none on CPUs; tests/gpu trains it."""
    assert "split_with_sizes expects" in run_ranks(train_densely, 1)


def check(result: dict[str, Any], layout: str, world_size: int) -> None:
    """Check the training, and that the lookups of every rank have the shards of the layout."""
    lays_out, types = (LAYOUTS | REPLICATED)[layout]
    tables = [Table(name, num_rows, DIM, 1.0, pooled=False) for name, num_rows in ROWS.items()]
    shards = [shard for i, table in enumerate(tables) for shard in lays_out(table, i, world_size)]
    for rank, found in enumerate(result["looked_up"]):
        assert found == sorted((s.table, s.rows, s.cols) for s in shards if s.rank == rank)
    if world_size == 1:  # the only row block is the whole table
        types = ["table_wise" if name == "row_wise" else name for name in types]
    assert result["types"] == types
    assert result["least_change"] > 5e-3, "a table did not train"
    assert result["output_error"] < 1e-5
    assert result["error"] < 1e-5


def test_every_layout_of_sequences_is_tried() -> None:
    topology = Topology(3, 10**9, local_world_size=1, compute_device="cpu")
    table = Table("s", 23, DIM, 1.0, pooled=False)
    tried = {
        layout_name(lays_out(table, 0, 3), table, topology) for lays_out, _ in LAYOUTS.values()
    }
    assert tried == {None, *SEQUENCE_LAYOUTS["cpu"]}
