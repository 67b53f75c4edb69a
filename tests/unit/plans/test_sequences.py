"""TorchRec 1.8 trains some layouts of tables whose vectors are not pooled; plans of others say why.

Tried on 2 gloo ranks: whole tables, row blocks on all ranks, and column shards that have one width
in the whole module, also several of a table on one rank, and beside whole tables, which have a
lookup of their own, train as on one rank. Others end in
FBGEMM's "Mixed dimension tables only supported for pooling tables", and replicas on CPUs in pooled
vectors.
"""

import dataclasses
import re

import pytest

from dlrm_sharded import InvalidPlanError, Shard, ShardingPlan, Table, validate
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.layouts import Replicas, RowBlocks, layout_of
from dlrm_sharded.plans.sequences import equal_widths
from dlrm_sharded.plans.task import ShardingTask, Topology
from tests.unit.made_up import column_shards

TABLES = tuple(Table(f"t{i}", 40, 16, 5.0, pooled=False, module="history") for i in range(2))
HALVES = [(0, 8), (1, 8)]
WHOLE = [Shard.whole(TABLES[1], 1)]


def check(first: list[Shard], second: list[Shard], *, device: str = "cpu", **changes: str) -> None:
    """Validate a plan of both tables on two hosts of two ranks."""
    tables = (TABLES[0], dataclasses.replace(TABLES[1], **changes))
    task = ShardingTask(tables, Topology(4, 10**6, 2, compute_device=device), 64)
    validate(ShardingPlan(4, (*first, *second)), task)


def test_what_trains() -> None:
    rows = [RowBlocks(range(4)).shards(table) for table in TABLES]
    check([Shard.whole(TABLES[0], 0)], WHOLE)
    check(*rows)
    check(rows[0], column_shards(TABLES[1], *HALVES))
    check(column_shards(TABLES[0], *HALVES), column_shards(TABLES[1], (2, 8), (2, 8)))
    check(column_shards(TABLES[0], *HALVES), WHOLE)
    # of another module, or not a sequence: then its width is its own affair
    check(column_shards(TABLES[0], *HALVES), WHOLE, module="candidates")
    task = ShardingTask(
        (TABLES[0], dataclasses.replace(TABLES[1], pooled=True)), Topology(4, 10**6), 64
    )
    validate(ShardingPlan(4, (*column_shards(TABLES[0], *HALVES), *WHOLE)), task)
    check(Replicas(4).shards(TABLES[0]), WHOLE, device="cuda")


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (column_shards(TABLES[0], (0, 12), (1, 4)), "'t0' .* a shard of 4 columns"),
        (RowBlocks(range(2)).shards(TABLES[0]), "'t0' .* row blocks on the ranks of one host"),
        (Replicas(4).shards(TABLES[0]), "'t0' .* is replicated, and .* pools on cpu"),
    ],
    ids=["uneven", "host_rows", "replicas"],
)
def test_what_does_not_train_is_refused_by_table_module_and_reason(
    first: list[Shard], message: str
) -> None:
    with pytest.raises(InvalidPlanError, match=message) as error:
        check(first, WHOLE)
    assert re.search("of module 'history' is a sequence .* row blocks on all", str(error.value))


def test_tables_of_one_module_have_one_width() -> None:
    other = dataclasses.replace(TABLES[1], embedding_dim=32)
    with pytest.raises(ConfigError, match="'t0' and 't1' of module 'history' have 16 and 32"):
        ShardingTask((TABLES[0], other), Topology(4, 10**6), 64)
    pooled = dataclasses.replace(other, pooled=True)
    elsewhere = dataclasses.replace(other, module="candidates")
    for tables in ((TABLES[0], pooled), (TABLES[0], elsewhere)):
        ShardingTask(tables, Topology(4, 10**6), 64)


def test_column_shards_of_a_module_have_one_width() -> None:
    quarters = column_shards(TABLES[1], *[(rank, 4) for rank in range(4)])
    with pytest.raises(InvalidPlanError, match=r"'t1' .* a shard of 4 columns, and table 't0' one"):
        check(column_shards(TABLES[0], *HALVES), quarters)


def test_widths_that_a_module_can_have() -> None:
    """Equal multiples of 4 columns; one of wide tables, and none where a table may not be split."""
    bag, wide = Table("bag", 40, 24, 5.0), Table("wide", 40, 4096, 5.0, pooled=False)
    kept = dataclasses.replace(TABLES[1], layouts=frozenset({"rows"}))
    narrow = Table("narrow", 40, 4, 5.0, pooled=False, module="narrow")
    gpus = Topology(4, 10**6, compute_device="cuda")
    assert equal_widths([*TABLES, bag, narrow], gpus) == {"history": (8, 4)}
    assert equal_widths([TABLES[0], kept, wide], gpus) == {"": (2048,)}


def test_whole_sequences_have_a_lookup_of_their_own() -> None:
    """TorchRec has one for each sharding type."""
    topology = Topology(4, 10**6)
    halves = column_shards(TABLES[0], *HALVES)
    bag = dataclasses.replace(TABLES[1], pooled=True)
    for shards, table, name in (
        (halves, TABLES[0], "column_wise"),
        (WHOLE, TABLES[1], "table_wise"),
        (WHOLE, bag, "column_wise"),
    ):
        assert layout_of(shards, table, topology).torchrec_type(topology) == name
