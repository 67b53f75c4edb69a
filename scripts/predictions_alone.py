"""What the search loses on a cost model that only predicts, against the search that has prices.

    python scripts/predictions_alone.py

Both search by rounds under the learned model of the package; the second one is not told that it is
additive. A row says the seconds of each, how much dearer the plan by predictions is at the end and
after the seconds of the other, and when a valid plan within 2 % of the other was first predicted.
"""

from __future__ import annotations

import statistics
import time

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
from dlrm_sharded.files.text_table import TextTable

NUM_TABLES, NUM_RANKS = (10, 20, 40, 60, 80, 120), (4, 6, 8)
NUM_REPEATS = 1
NEAR = 1.02
COLUMNS = ("tables", "ranks", "priced s", "asked s", "plans", "ratio", "same time", "2 % at s")


class OnlyPredicts:
    """Hides that a model is additive, and notes when it first predicted a plan of some cost."""

    def __init__(self, model: LearnedCostModel, good_ms: float = 0.0) -> None:
        self.model, self.good_ms = model, good_ms
        self.num_asked, self.started, self.good_at_s = 0, time.perf_counter(), float("nan")

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        self.num_asked += 1
        cost = self.model.price(task).predict(plan)
        if cost.cost_ms <= self.good_ms and self.good_at_s != self.good_at_s:
            try:
                validate(plan, task)
                self.good_at_s = time.perf_counter() - self.started
            except InvalidPlanError:
                pass
        return cost


def main() -> None:
    model = learned_cost_model(RunContext())
    tasks = [scaling_task(tables, ranks) for tables in NUM_TABLES for ranks in NUM_RANKS]
    print(TextTable(COLUMNS, [_row(model, task) for task in tasks]).markdown())


def _row(model: LearnedCostModel, task: ShardingTask) -> tuple[str, ...]:
    task = model.price(task).task
    priced_s, asked_s = [], []
    for _ in range(NUM_REPEATS):  # one after the other, so that both meet the same load
        started = time.perf_counter()
        best = make_sharder("neuroshard", model, time_budget_s=None).shard(task)
        priced_s.append(time.perf_counter() - started)
        best_ms = model.price(task).predict(best).cost_ms
        asked = OnlyPredicts(model, NEAR * best_ms)
        plan = make_sharder("neuroshard", asked, time_budget_s=None).shard(task)
        asked_s.append(time.perf_counter() - asked.started)
    in_time = make_sharder(
        "neuroshard", OnlyPredicts(model), time_budget_s=statistics.median(priced_s)
    ).shard(task)
    ratios = [model.price(task).predict(p).cost_ms / best_ms for p in (plan, in_time)]
    return (
        str(len(task.tables)),
        str(task.topology.world_size),
        f"{statistics.median(priced_s):.2f}",
        f"{statistics.median(asked_s):.2f}",
        str(asked.num_asked),
        *(f"{ratio:.4f}" for ratio in ratios),
        f"{asked.good_at_s:.2f}",
    )


if __name__ == "__main__":
    main()
