"""Journals of runs on made-up hardware, some of which are bad.

Runs of some tasks are measured with noise, and some of them are spoiled: all stages or one of them
slower, a rank beside a busy process, noise, other threads, another optimizer.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.made_up_hardware import NOISE, OPTIMIZER
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.fitting.confidence import Disturbance
from dlrm_sharded.fitting.run_journal import Conditions, RunJournal, measured_run
from dlrm_sharded.fitting.samples import TIMES, Sample
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import BWD_COMPUTE, STAGES, PlanCost
from dlrm_sharded.plans.task import ShardingTask

HERE = Conditions(OPTIMIZER, ranks_per_host=4, threads=1)


@dataclass(frozen=True, slots=True)
class Line:
    """A run as it is noted in a journal."""

    run: Sample
    conditions: Conditions = HERE
    beside: Disturbance | None = None


Spoil = Callable[[Sample, np.random.Generator], Line]
"""Returns what is noted of a run that something disturbed."""


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


def read_again(lines: Sequence[Line]) -> list[Sample]:
    """Return the runs that a start under the conditions here reads of a journal."""
    with tempfile.TemporaryDirectory() as folder:
        journal = RunJournal(Path(folder) / "runs.jsonl")
        for line in lines:
            journal.append(line.conditions, line.run, line.beside)
        return list(journal.read(HERE).values())


def run_of(
    plan: ShardingPlan, task: ShardingTask, true: LearnedCostModel, rng: np.random.Generator
) -> Sample:
    """Return the run of a plan as it is measured, with noise."""
    run = measured_run(plan, task, true.predict(plan, task))
    assert run is not None, "the tasks have one host"
    return _slower(
        run, {name: np.exp(NOISE * rng.standard_normal(run.world_size)) for name in TIMES}
    )
