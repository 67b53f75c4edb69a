"""Hosts: what knowing them is worth to a plan, and row blocks on the ranks of one."""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from dlrm_sharded import Planner, Shard, ShardingPlan, validate
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.plans.layouts import RowBlocks, is_row_wise
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask
from tests.unit.made_up import column_shards, task_of, with_topology
from tests.unit.search.made_up import model_of, searcher

PER_HOST = 4
LARGE = Table("large", 10**7, 32, 80.0)
MODEL = model_of("shipped")


def on_hosts(task: ShardingTask, *, inter_host_bytes_per_s: float) -> ShardingTask:
    """The same tables, on hosts of 4 ranks."""
    return with_topology(
        task,
        local_world_size=PER_HOST,
        intra_host_bytes_per_s=100e9,
        inter_host_bytes_per_s=inter_host_bytes_per_s,
    )


def in_columns(table: Table, ranks: Sequence[int]) -> list[Shard]:
    """Even pieces, one for each rank."""
    return column_shards(table, *((rank, table.embedding_dim // len(ranks)) for rank in ranks))


def dominated(*, inter_host_bytes_per_s: float) -> ShardingTask:
    """4 hosts of 4 ranks; most is to be done for one table."""
    others = [Table(f"t{i:02d}", 10**5, 16, 2.0) for i in range(32)]
    task = with_profiles(task_of((LARGE, *others), 16, 4 * GIB, 16_384))
    return on_hosts(task, inter_host_bytes_per_s=inter_host_bytes_per_s)


@pytest.mark.parametrize(
    ("inter_host_bytes_per_s", "num_blocks"), [(1e8, PER_HOST), (1e10, 16)], ids=["slow", "fast"]
)
def test_row_blocks_stay_on_one_host_where_links_between_hosts_are_slow(
    inter_host_bytes_per_s: float, num_blocks: int
) -> None:
    task = dominated(inter_host_bytes_per_s=inter_host_bytes_per_s)
    plan, report = Planner(searcher(patience=2), MODEL).plan(task)
    validate(plan, task)
    shards = plan.shards_by_table()[LARGE.name]
    assert is_row_wise(shards, LARGE)
    assert len(shards) == num_blocks
    assert len({shard.rank // PER_HOST for shard in shards}) == num_blocks // PER_HOST
    for other_ms in other_costs_ms(task, plan):
        assert report.cost.cost_ms < 0.9 * other_ms


def other_costs_ms(task: ShardingTask, plan: ShardingPlan) -> Iterator[float]:
    """Of the large table in each other way, and of the best plan that leaves it whole."""
    others = tuple(shard for shard in plan.shards if shard.table != LARGE.name)
    first = min(shard.rank for shard in plan.shards_by_table()[LARGE.name])
    host = range(first, first + PER_HOST)
    for shards in (
        RowBlocks(host).shards(LARGE),
        RowBlocks(range(16)).shards(LARGE),
        in_columns(LARGE, host),
        in_columns(LARGE, range(0, 16, PER_HOST)),
    ):
        if not set(shards) <= set(plan.shards):
            other = dataclasses.replace(plan, shards=(*others, *shards))
            validate(other, task)
            yield MODEL.predict(other, task).cost_ms
    whole = searcher(patience=2, unsplit=[LARGE.name]).shard(task)
    yield MODEL.predict(whole, task).cost_ms
