"""Synthetic cases and entries of a contest."""

import dataclasses
from typing import Any

from dlrm_sharded.contest.cases import Case, Entry, Outcome
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.planning import Planner
from tests.unit.synthetic import tables_of, task_of

TASK = task_of(tables_of((100, 8, 1.0), (50, 4, 2.0), (30, 16, 1.0)))


class SumOfColumns:
    """A cost model that is not additive: a lookup takes a ms for each column of a rank."""

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        columns = [float(sum(s.num_cols for s in shards)) for shards in plan.shards_by_rank()]
        return PlanCost(tuple(StageCost(ms, 0.0, 0.0, 0.0) for ms in columns))


@dataclasses.dataclass
class AllOn:
    """Places all tables on one rank, and fails in a given way."""

    rank: int = 0
    error: Exception | None = None

    def shard(self, task: ShardingTask) -> ShardingPlan:
        if self.error is not None:
            raise self.error
        return ShardingPlan.from_ranks(task, [self.rank] * len(task.tables))


def case_of(name: str = "t", sharder: str = "a", task: ShardingTask = TASK, **options: Any) -> Case:
    """Return a case for `AllOn` with these options."""
    planner = Planner(AllOn(**options), SumOfColumns(), options={"rank": options.get("rank", 0)})
    return Case(name, sharder, task, planner, costs_digest="digest")


def cost_of(*rank_ms: float) -> PlanCost:
    """Return a cost of ranks, three quarters of it for lookups."""
    return PlanCost(tuple(StageCost(0.75 * ms, 0.0, 0.25 * ms, 0.0) for ms in rank_ms))


def entry_of(task: str, sharder: str, ms: float | None, **fields: Any) -> Entry:
    """Return an entry whose plan has this cost on the second of two ranks; None: it has no plan."""
    found: dict[str, Any] = {"solve_s": 1.0, "limit_s": 9.0, "error": "no memory"}
    if ms is not None:
        places = (("x", 1, 4), ("y", 1, 8), ("z", 0, 4))
        shards = tuple(Shard(table, rank, (0, 9), (0, columns)) for table, rank, columns in places)
        found |= {"error": None, "cost": cost_of(ms / 2, ms), "shards": shards}
    return Entry(case_of(task, sharder), Outcome(**found | fields))
