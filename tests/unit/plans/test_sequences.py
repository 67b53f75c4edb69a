"""Tables whose vectors are not pooled are whole or in row blocks; plans of others say why."""

import dataclasses
import re

import pytest

from dlrm_sharded import InvalidPlanError, Shard, ShardingPlan, Table, validate
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.layouts import Replicas, RowBlocks, layout_of
from dlrm_sharded.plans.task import ShardingTask, Topology
from tests.unit.synthetic import column_shards

TABLES = tuple(Table(f"t{i}", 40, 16, 5.0, pooled=False, module="history") for i in range(2))
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
    check(rows[0], WHOLE)
    check(rows[0], WHOLE, module="candidates")
    check(Replicas(4).shards(TABLES[0]), WHOLE, device="cuda")


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (column_shards(TABLES[0], (0, 8), (1, 8)), "'t0' .* in column shards on a cpu"),
        (column_shards(TABLES[0], (0, 12), (1, 4)), "'t0' .* in column shards on a cpu"),
        (RowBlocks(range(2)).shards(TABLES[0]), "'t0' .* row blocks on the ranks of one host"),
        (Replicas(4).shards(TABLES[0]), "'t0' .* in replicas on a cpu"),
    ],
    ids=["halves", "uneven", "host_rows", "replicas"],
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


def test_sequences_wider_than_a_lookup_are_refused() -> None:
    wide = dataclasses.replace(TABLES[0], embedding_dim=4096)
    task = ShardingTask((wide,), Topology(1, 10**6), 64)
    with pytest.raises(InvalidPlanError, match=r"'t0' .* has 4,096 columns, .* no plan splits"):
        validate(ShardingPlan(1, (Shard.whole(wide, 0),)), task)


def test_whole_sequences_have_a_lookup_of_their_own() -> None:
    """TorchRec has one for each sharding type."""
    topology = Topology(4, 10**6)
    bag = dataclasses.replace(TABLES[1], pooled=True)
    for shards, table, name in ((WHOLE, TABLES[1], "table_wise"), (WHOLE, bag, "column_wise")):
        assert layout_of(shards, table, topology).torchrec_type(topology) == name
