"""Errors of the profiles that are assumed for tables without a measured one.

The tables of every task are accessed in a known pattern. Each assumption is compared with the true
profiles: by the price of each whole table, and by the true cost of the plan that it leads to.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable

import numpy as np

from benchmarks.compared import cost_of, markdown, planner_of, quiet
from dlrm_sharded.accesses.patterns import (
    AccessPattern,
    HotSetAccesses,
    ReuseBinAccesses,
    UniformAccesses,
    ZipfAccesses,
)
from dlrm_sharded.accesses.profiles import SKEWS, histograms_by_skew, with_profiles
from dlrm_sharded.accesses.zipf import Zipf
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.expected_profiles import with_expected_profiles
from dlrm_sharded.cost.features import Floats, workload_of_plan
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.datasets.task_sets import paper_tasks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask

SMALL_BATCH_SIZE = 8192
"""Batch size of every second task; the others have the papers' one."""

Draw = Callable[[np.random.Generator], AccessPattern]
Assume = Callable[[ShardingTask, ComputeModel], ShardingTask]


def draw_hot_set(rng: np.random.Generator) -> AccessPattern:
    return HotSetAccesses(float(10 ** rng.uniform(-4, -1)), float(rng.uniform(0.3, 0.95)))


def draw_zipf(rng: np.random.Generator) -> AccessPattern:
    return ZipfAccesses(round(float(rng.uniform(0.5, 1.15)), 2))


PATTERNS: dict[str, Draw] = {
    "uniform": lambda rng: UniformAccesses(),
    "hot set and tail": draw_hot_set,
    "reuse bins of dlrm_datasets": lambda rng: ReuseBinAccesses(),
    "Zipf, exponents 0.5 to 1.15": draw_zipf,
}


def draw_any(rng: np.random.Generator) -> AccessPattern:
    return list(PATTERNS.values())[rng.integers(len(PATTERNS))](rng)


PATTERNS_AND_MIX = {**PATTERNS, "a mix of them": draw_any}


def with_mixtures(task: ShardingTask, compute: ComputeModel) -> ShardingTask:
    """Give every table the mean of the histograms of `SKEWS`, weighted by their unique ids."""
    tables = []
    for table in task.tables:
        num_draws = task.batch_size * table.pooling_factor
        by_skew = histograms_by_skew(table.num_embeddings, num_draws)
        unique = [
            weight * Zipf(table.num_embeddings, exponent).expected_num_unique(num_draws)
            for exponent, weight in SKEWS.items()
        ]
        histogram = np.average(by_skew, axis=0, weights=unique)
        tables.append(dataclasses.replace(table, reuse_histogram=tuple(histogram.tolist())))
    return dataclasses.replace(task, tables=tuple(tables))


ASSUMPTIONS: dict[str, Assume] = {
    "exponent 0.9": lambda task, compute: with_profiles(task),
    "mixture of histograms": with_mixtures,
    "mean price": with_expected_profiles,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tasks", type=int, default=24, help="number of tasks of each pattern [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=8, help="seed of the tasks [%(default)s]")


def run(options: argparse.Namespace) -> None:
    quiet()
    planner = planner_of("neuroshard,sharder.patience=0")
    model = planner.cost_model
    assert isinstance(model, LearnedCostModel)
    rng = np.random.default_rng(options.seed)
    lines = []
    for pattern, draw in PATTERNS_AND_MIX.items():
        errors: dict[str, list[float]] = {name: [] for name in ASSUMPTIONS}
        ratios: dict[str, list[float]] = {name: [] for name in ASSUMPTIONS}
        for number, entry in enumerate(paper_tasks(options.seed, num=options.tasks)):
            task = entry.task
            if number % 2:
                task = dataclasses.replace(task, batch_size=SMALL_BATCH_SIZE)
            known = with_pattern(task, draw, rng)
            best_ms = cost_of(planner, planner.plan(known)[0], known).cost_ms
            known_ms = whole_ms(known, model.compute)
            for name, assume in ASSUMPTIONS.items():
                assumed = assume(task, model.compute)
                errors[name] += np.log(whole_ms(assumed, model.compute) / known_ms).tolist()
                plan, _ = planner.plan(assumed)
                ratios[name].append(cost_of(planner, plan, known).cost_ms / best_ms)
        for name in ASSUMPTIONS:
            error, ratio = 100 * np.array(errors[name]), ratios[name]
            lines.append(
                [
                    pattern,
                    name,
                    f"{np.abs(error).mean():.1f}",
                    f"{error.mean():+.1f}",
                    f"{np.mean(ratio):.3f}",
                    f"{max(ratio):.3f}",
                ]
            )
    header = ["accesses", "assumed", "price of a table: error, %", "bias, %"]
    print(markdown([*header, "plan over one that knows: mean", "worst"], lines))


def with_pattern(task: ShardingTask, draw: Draw, rng: np.random.Generator) -> ShardingTask:
    """Return the task with the expected histogram of a drawn pattern for every table."""

    def profiled(table: Table) -> Table:
        num_draws = task.batch_size * table.pooling_factor
        accesses = draw(rng).distribution(table.num_embeddings, num_draws)
        histogram = accesses.expected_reuse_histogram(num_draws)
        return dataclasses.replace(table, reuse_histogram=histogram)

    return dataclasses.replace(task, tables=tuple(map(profiled, task.tables)))


def whole_ms(task: ShardingTask, compute: ComputeModel) -> Floats:
    """Return the price of each whole table on a rank of its own."""
    plan = ShardingPlan(
        task.topology.world_size, tuple(Shard.whole(table, 0) for table in task.tables)
    )
    return compute.stand_alone_ms(compute.vectors(workload_of_plan(plan, task)))
