"""The search on a cost model that only predicts, against the search that has prices.

Both search by rounds under the learned model of the package; the second one is not told that it is
additive.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Iterator, Sequence
from itertools import product

from dlrm_sharded import (
    InvalidPlanError,
    PlanCost,
    RunContext,
    ShardingPlan,
    ShardingTask,
    learned_cost_model,
    make_sharder,
    validate,
)
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.datasets.task_sets import scaling_task
from dlrm_sharded.files.text_table import Column, TextTable
from studies.parts import option
from studies.study import Case, Row

BASIS = "predicted"
NEAR = 1.02
OPTIONS = {
    "tables": option((10, 20, 40, 60, 80, 120), "numbers of tables"),
    "ranks": option((4, 6, 8), "numbers of ranks"),
}
COLUMNS = (
    *("tables", "ranks", Column("search with prices, s", ".2f")),
    *(Column("by predictions, s", ".2f"), "plans predicted", Column("cost, relative", ".4f")),
    *(Column("cost in equal time", ".4f"), Column("within 2 % after, s", ".2f")),
)


class OnlyPredicts:
    """Hides that a model is additive, and notes when it first predicted a plan of some cost."""

    def __init__(self, model: LearnedCostModel, good_ms: float = 0.0) -> None:
        self.model, self.good_ms = model, good_ms
        self.num_asked, self.started, self.good_at_s = 0, time.perf_counter(), math.nan

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        self.num_asked += 1
        cost = self.model.price(task).predict(plan)
        if cost.cost_ms <= self.good_ms and math.isnan(self.good_at_s) and _is_valid(plan, task):
            self.good_at_s = time.perf_counter() - self.started
        return cost


def _is_valid(plan: ShardingPlan, task: ShardingTask) -> bool:
    try:
        validate(plan, task)
    except InvalidPlanError:
        return False
    return True


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for num_tables, num_ranks in product(options.tables, options.ranks):
        yield Case(f"{num_tables}x{num_ranks}", functools.partial(_rows, num_tables, num_ranks))


def _rows(num_tables: int, num_ranks: int) -> list[Row]:
    model = learned_cost_model(RunContext())
    task = model.price(scaling_task(num_tables, num_ranks)).task
    started = time.perf_counter()
    best = make_sharder("neuroshard", model, time_budget_s=None).shard(task)
    priced_s = time.perf_counter() - started
    best_ms = model.price(task).predict(best).cost_ms
    asked = OnlyPredicts(model, NEAR * best_ms)
    plan = make_sharder("neuroshard", asked, time_budget_s=None).shard(task)
    asked_s = time.perf_counter() - asked.started
    in_time = make_sharder("neuroshard", OnlyPredicts(model), time_budget_s=priced_s).shard(task)
    ratios = [model.price(task).predict(found).cost_ms / best_ms for found in (plan, in_time)]
    times = {"priced_s": priced_s, "asked_s": asked_s, "num_asked": asked.num_asked}
    size = {"num_tables": num_tables, "num_ranks": num_ranks}
    good_s = None if math.isnan(asked.good_at_s) else asked.good_at_s
    figures = {"ratio": ratios[0], "in_time": ratios[1], "good_s": good_s}
    return [size | times | figures]


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write the seconds of both searches, and what the plans by predictions cost."""
    return TextTable(COLUMNS, [tuple(row.values()) for row in rows]).markdown()
