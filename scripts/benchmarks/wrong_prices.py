"""How much dearer plans are that were made with wrong prices of lookups, judged by the right ones.

The prior stands for the right prices, and lookups at a part of them for wrong ones, and the other
way round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

from benchmarks.mlperf_steps import MLPERF_BATCH_SIZES, mlperf_task, neuroshard, prior_model
from benchmarks.planners import on_device
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.datasets.paper_tables import PAPER_SETS
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.plans.task import ShardingTask
from studies.study import Row

FACTOR = 0.7
"""Wrong prices of lookups over the right ones."""

GPU = "h100_sxm"
NUM_OF_SET = {
    "neuroshard_table_1": 12,
    "neuroshard_table_2": 6,
    "dreamshard_table_1": 10,
    "autoshard_synthetic": 4,
}
"""Number of tasks of each packaged set."""


def wrong_prices(num: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield a name and a row for each task."""
    for name, size in NUM_OF_SET.items():
        for number, found in enumerate(PAPER_SETS[name](num=min(size, num or size))):
            task = on_device(found.task, "cuda")
            yield f"{name} {number}", functools.partial(_row, name, number, task)
    for number, (num_gpus, batch_size) in enumerate([*MLPERF_BATCH_SIZES.items()][:num]):
        task = on_device(mlperf_task(num_gpus, batch_size, gpu_specs()[GPU]), "cuda")
        yield f"mlperf {num_gpus}", functools.partial(_row, "mlperf", number, task)


def _row(name: str, number: int, task: ShardingTask) -> Row:
    right = prior_model(gpu_specs()[GPU])
    wrong = dataclasses.replace(right, compute=right.compute.scaled(FACTOR, FACTOR))
    plans = [neuroshard(model).shard(task) for model in (right, wrong)]

    def excess(judge: LearnedCostModel, made_right: int) -> float:
        costs = [judge.predict(plan, task).cost_ms for plan in plans]
        return costs[1 - made_right] / costs[made_right] - 1.0

    return {
        "set": name,
        "number": number,
        "tables": len(task.tables),
        "ranks": task.topology.world_size,
        "too_cheap": excess(right, 0),
        "too_dear": excess(wrong, 1),
    }
