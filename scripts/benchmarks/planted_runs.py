"""Plans after journals of runs on made-up hardware, some of which are bad.

Runs of some tasks are measured with noise, and some of them are spoiled: all stages or one of them
slower, a rank beside a busy process, noise, other threads, another optimizer. Each journal corrects
the packaged prices, those of a first start, and those of a calibration of two minutes.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.datasets.task_sets import measured_tasks
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.fitting.confidence import Disturbance
from dlrm_sharded.fitting.picture import corrected
from dlrm_sharded.fitting.run_journal import Conditions, RunJournal, measured_run
from dlrm_sharded.fitting.samples import TIMES, Sample
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import BWD_COMPUTE, STAGES, PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.neuroshard import NeuroShardSharder
from studies.study import Row

RUN_SEED = 2000
"""Seed of the tasks of the runs, which are none of those that plans are compared on."""

NUM_RUNS = 10
NOISE = 0.05
HERE = Conditions("rowwise_adagrad", ranks_per_host=4, threads=1)
NO_RUNS = "no runs"


@dataclass(frozen=True, slots=True)
class Line:
    """A run as it is noted in a journal."""

    run: Sample
    conditions: Conditions = HERE
    beside: Disturbance | None = None


Spoil = Callable[[Sample, np.random.Generator], Line]
"""Returns what is noted of a run that something disturbed."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices before any run; for those of a first start, the prior and what was measured."""

    model: LearnedCostModel
    started: tuple[LearnedCostModel, Sequence[Sample]] | None = None


def _slower(run: Sample, factors: Mapping[str, float | np.ndarray]) -> Sample:
    """Return a run whose stages take so many times as long, on all ranks or on each by itself."""
    cost, size = run.cost, len(run.cost.per_rank)
    by_rank = {name: np.broadcast_to(factors.get(name, 1.0), size).tolist() for name in TIMES}
    assert cost.input_dist_ms is not None
    stages = {
        stage: [
            factor * rank.stage_ms(stage)
            for factor, rank in zip(by_rank[stage], cost.per_rank, strict=True)
        ]
        for stage in STAGES
    }
    ids = [f * ms for f, ms in zip(by_rank[TIMES[0]], cost.input_dist_ms, strict=True)]
    slower = PlanCost.from_stages(stages, input_dist_ms=tuple(ids))
    return dataclasses.replace(run, cost=slower)


def _busy_rank(run: Sample, rng: np.random.Generator) -> Sample:
    factors = np.ones(run.world_size)
    factors[rng.integers(run.world_size)] = 2.0
    return _slower(run, dict.fromkeys(TIMES, factors))


SPOILED: dict[str, Spoil] = {
    "all stages x 3": lambda run, _: Line(_slower(run, dict.fromkeys(TIMES, 3.0))),
    "a rank x 2": lambda run, rng: Line(_busy_rank(run, rng)),
    "a rank x 2, seen": lambda run, rng: Line(
        _busy_rank(run, rng), beside=Disturbance(core_wait=0.5)
    ),
    "backward x 4": lambda run, _: Line(_slower(run, {BWD_COMPUTE: 4.0})),
    "noise of 70 %": lambda run, rng: Line(
        _slower(run, {name: np.exp(0.7 * rng.standard_normal(run.world_size)) for name in TIMES})
    ),
}
"""Ways in which a run is bad."""

OTHERS: dict[str, Spoil] = {
    "other threads": lambda run, _: Line(
        _slower(run, {BWD_COMPUTE: 0.3}), dataclasses.replace(HERE, threads=2)
    ),
    "other optimizer": lambda run, _: Line(
        _slower(run, {BWD_COMPUTE: 0.3}), dataclasses.replace(HERE, optimizer="sgd")
    ),
}
"""Runs that do not count, however many there are."""

MIXED, ALONE = (1, 3), (1, 3)
"""Numbers of bad runs among ten, and in a journal without others."""


def journals(runs: Sequence[Sample], rng: np.random.Generator) -> Iterator[tuple[str, list[Line]]]:
    """Yield journals by name: of good runs, with some bad ones, and of bad ones alone."""
    for num in (1, 3, len(runs)):
        yield f"{num} good", [Line(run) for run in runs[:num]]
    for name, spoil in {**SPOILED, **OTHERS}.items():
        for num in MIXED if name in SPOILED else MIXED[-1:]:
            bad = rng.choice(len(runs), num, replace=False)
            lines = [spoil(run, rng) if i in bad else Line(run) for i, run in enumerate(runs)]
            yield f"{name}: {num} of {len(runs)}", lines
        for num in ALONE if name in SPOILED else ():
            yield f"{name}: {num} alone", [spoil(run, rng) for run in runs[:num]]


def read_again(lines: Sequence[Line], conditions: Conditions = HERE) -> list[Sample]:
    """Return what a start under the conditions reads of a journal with these lines."""
    with tempfile.TemporaryDirectory() as folder:
        journal = RunJournal(Path(folder) / "runs.jsonl")
        for line in lines:
            journal.append(line.conditions, line.run, line.beside)
        return list(journal.read(conditions).values())


def journal_rows(
    true: LearnedCostModel, prices: Mapping[str, Prices], *, seed: int, num_tasks: int
) -> list[Row]:
    """Return the true costs of plans by prices that each of the journals has corrected."""
    tasks = _tasks(seed, num_tasks)
    best = [true.predict(_plan(true, task), task).cost_ms for task in tasks]
    rows: list[Row] = []
    for title, before in prices.items():
        rng = np.random.default_rng([RUN_SEED, seed])
        runs = [_run(true, before.model, task, rng) for task in _tasks(RUN_SEED + seed, NUM_RUNS)]
        uncorrected: list[Row] = []
        for name, lines in ((NO_RUNS, []), *journals(runs, rng)):
            model = corrected(before.model, read_again(lines), started=before.started)
            is_corrected = model is not before.model
            costs = uncorrected if uncorrected and not is_corrected else []
            costs = costs or [_costs(true, model, task) for task in tasks]
            uncorrected = uncorrected or costs  # the first journal is empty
            rows += [
                {"prices": title, "journal": name, "number": number, "best_ms": best[number]} | row
                for number, row in enumerate(costs)
            ]
    return rows


def _costs(true: LearnedCostModel, model: LearnedCostModel, task: ShardingTask) -> Row:
    plan = _plan(model, task)
    return {
        "cost_ms": true.predict(plan, task).cost_ms,
        "predicted_ms": model.predict(plan, task).cost_ms,
    }


def _tasks(seed: int, num: int) -> list[ShardingTask]:
    return [with_profiles(found.task) for found in measured_tasks(seed, num=num)]


def _plan(model: LearnedCostModel, task: ShardingTask) -> ShardingPlan:
    return NeuroShardSharder(SharderContext(cost_model=model)).shard(task)


def _run(
    true: LearnedCostModel, model: LearnedCostModel, task: ShardingTask, rng: np.random.Generator
) -> Sample:
    plan = _plan(model, task)
    run = measured_run(plan, task, true.predict(plan, task))
    assert run is not None, "the tasks have one host"
    noise = {name: np.exp(NOISE * rng.standard_normal(run.world_size)) for name in TIMES}
    return _slower(run, noise)


def journal_report(rows: Sequence[Row]) -> str:
    """Write the costs of plans after each journal over those without runs, and over the best."""
    lines = []
    for title in dict.fromkeys(row["prices"] for row in rows):
        of_title = [row for row in rows if row["prices"] == title]
        before = _by_task(row for row in of_title if row["journal"] == NO_RUNS)
        for name in dict.fromkeys(row["journal"] for row in of_title):
            found = [row for row in of_title if row["journal"] == name]
            over = [row["cost_ms"] / before[row["kind"], row["number"]] for row in found]
            by_kind: dict[str, list[float]] = {}
            for row, ratio in zip(found, over, strict=True):
                by_kind.setdefault(row["kind"], []).append(ratio)
            errors = [abs(math.log(row["predicted_ms"] / row["cost_ms"])) for row in found]
            lines.append(
                [
                    *(title, name),
                    100 * math.expm1(float(np.mean(errors))),
                    float(np.mean([row["cost_ms"] / row["best_ms"] for row in found])),
                    float(np.mean(over)),
                    max(float(np.mean(ratios)) for ratios in by_kind.values()),
                ]
            )
    columns: list[Column | str] = [
        *("prices", "journal"),
        Column("error, %", ".1f"),
        Column("over true", ".3f"),
        Column("over no runs", ".3f"),
        Column("worst kind", ".3f"),
    ]
    return TextTable(columns, lines).markdown()


def _by_task(rows: Iterable[Row]) -> dict[tuple[str, int], float]:
    return {(row["kind"], row["number"]): row["cost_ms"] for row in rows}
