"""The ranks of a task's plans as plans of a few ranks, which a calibration can measure."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.calibration.drawn_plans import plan_of_drawn
from dlrm_sharded.calibration.random_plans import RankLimits
from dlrm_sharded.calibration.task_plans import TaskPlans, tables_of_ranks
from dlrm_sharded.cost.workload import Workload, workload_of_plan
from dlrm_sharded.plans.layouts import ColumnShards, Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask, Topology

ONCE = (1.0, *[0.0] * (NUM_REUSE_BINS - 1))
WHOLE, SPLIT, ROWS, SMALL = TABLES = tuple(
    Table(name, 40_000, 32, ids, ONCE)
    for name, ids in [("whole", 2.0), ("split", 5.0), ("rows", 8.0), ("small", 1.0)]
)
TASK = ShardingTask(TABLES, Topology(4, memory_bytes=2**30), batch_size=1024)
PLAN = ShardingPlan(
    4,
    (
        Shard.whole(WHOLE, 0),
        *ColumnShards.shards(SPLIT, [(1, 24), (2, 8)]),
        *RowBlocks(range(4)).shards(ROWS),
        *Replicas(4).shards(SMALL),
    ),
)
NO_LIMITS = RankLimits(table_bytes=2**40, ids_per_step=2**40)


def workload_of_ranks(ranks: list[int]) -> Workload:
    drawn = tables_of_ranks(PLAN, TASK, ranks)
    topology = Topology(len(ranks), memory_bytes=2**30)
    return workload_of_plan(*plan_of_drawn(drawn, TASK.batch_size, topology))


@pytest.mark.parametrize("ranks", [[0], [1, 2], [2, 0], [3, 1, 0, 2]])
def test_each_rank_has_the_work_that_it_has_beside_all_others(ranks: list[int]) -> None:
    whole, part = workload_of_plan(PLAN, TASK), workload_of_ranks(ranks)
    for place, rank in enumerate(ranks):
        of_plan, of_part = whole.rank == rank, part.rank == place

        def rows(workload: Workload, chosen: np.ndarray) -> list[tuple[int, ...]]:
            columns = (workload.num_rows, workload.num_cols, workload.num_ids)
            return sorted(
                zip(*(column[chosen].round().tolist() for column in columns), strict=True)
            )

        assert rows(part, of_part) == rows(whole, of_plan)


def test_shared_tables_stay_shared() -> None:
    part = workload_of_ranks([1, 2])
    assert sorted(part.group_size.tolist()) == [0, 0, 1, 1, 2, 2]


def test_accesses_are_those_of_the_table() -> None:
    """Rows of ONCE are used once at most, where a Zipf distribution would have hot ones."""
    part = workload_of_ranks([0])
    assert part.uses().max() < 1.2


def test_tables_without_a_profile() -> None:
    tables = tuple(dataclasses.replace(table, reuse_histogram=None) for table in TABLES)
    assert len(tables_of_ranks(PLAN, dataclasses.replace(TASK, tables=tables), [0])) == 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drawn_ranks_share_the_batch_within_their_limits(world_size: int) -> None:
    limits = RankLimits(table_bytes=2**20, ids_per_step=4_000)
    plans = TaskPlans(TASK, (PLAN,))
    seen = set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        batch_size, drawn = plans.draw(rng, world_size=world_size, limits=limits)
        assert batch_size % world_size == 0
        topology = Topology(world_size, memory_bytes=2**30)
        plan, task = plan_of_drawn(drawn, batch_size, topology)
        part = workload_of_plan(plan, task)
        assert part.by_rank(part.num_ids).max() < 4_001
        for shards in plan.shards_by_rank():
            assert sum(shard.weight_bytes for shard in shards) <= 2**20
        seen.add(tuple(table.num_cols for table in drawn))
    assert len(seen) > 1, "all ranks of the plan are measured"


def test_as_many_ranks_as_a_plan_has_busy_ones() -> None:
    """A plan on fewer ranks than measure has some of its ranks on several of these."""
    plan = ShardingPlan(4, tuple(Shard.whole(table, 1) for table in TABLES))
    _, drawn = TaskPlans(TASK, (plan,)).draw(
        np.random.default_rng(0), world_size=2, limits=NO_LIMITS
    )
    assert [table.rank for table in drawn] == [0] * 4 + [1] * 4


def test_sequences_stay_sequences() -> None:
    sequence = dataclasses.replace(WHOLE, pooled=False, module="history")
    task = dataclasses.replace(TASK, tables=(sequence, *TABLES[1:]))
    drawn = tables_of_ranks(PLAN, task, [0, 3])
    assert [table.pooled for table in drawn].count(False) == 1
    plan, of_part = plan_of_drawn(drawn, TASK.batch_size, Topology(2, memory_bytes=2**30))
    part = workload_of_plan(plan, of_part)
    assert part.is_sequence is not None
    assert part.num_vectors[part.is_sequence].tolist() == part.num_ids[part.is_sequence].tolist()
