"""The first start on hardware without prices: a few measurements adapt the prior to it.

The plans are made up of the run's own tables (`start_plans`), and chosen by what they tell
(`start_design`). They are measured as those of a collection are, and serve the same fit
(`adapt.fit_factors`). What was measured is kept in a file, which later starts read.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlrm_sharded.calibration.collect import BAR_FORMAT
from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.calibration.start_design import Design
from dlrm_sharded.calibration.start_plans import StartPlan
from dlrm_sharded.cost.communication import Hosts
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Workload
from dlrm_sharded.files.progress_bar import ProgressBar
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.plans.plan_cost import STAGES

log = logging.getLogger(__name__)

MEASURE = MeasureConfig(iterations=8, warmup=1, num_batches=2, time_budget_s=0.25)
"""Length of one measurement."""

NEW_SHARE = 0.7
"""Share of the time for plans that were not measured yet; in the rest, plans are repeated."""

MAX_ATTEMPTS = 3
"""Largest number of measurements of one plan."""

FIT_SHARE = 0.1
"""Share of the time that is left for the fit and its errors."""

BUILD_S, ID_S = 0.08, 1e-7
"""Time to shard the tables of a plan, and to draw an id, as long as no plan was measured."""

CHANGE = 1.25
"""Factor between two measurements of the same plan that tells of other work."""

MAX_CORE_WAIT = 0.1
"""Largest share of the time in which other processes may have had a rank's core."""


Decide = Callable[[Callable[[], tuple[int, int] | None]], tuple[int, int] | None]
"""Runs a function on rank 0, and returns its result on all ranks."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a first start.

    Args:
        samples: plans, each with the medians of its measurements.
        num_measurements: number of all measurements.
        seconds: time that they took.
        change: median factor between two measurements of one plan; None if none was repeated.
    """

    samples: tuple[Sample, ...]
    num_measurements: int
    seconds: float
    change: float | None


@dataclass(slots=True)
class Chooser:
    """Chooses the next measurement; rank 0 has one.

    Args:
        seconds: predicted time of a measurement, by plan.
        new_s: time until which plans are measured that were not measured before.
        pace: times of the latest measurements over the predicted ones.
        attempts: number of measurements by plan, in the order of the first one.
    """

    design: Design
    seconds: Sequence[float]
    new_s: float
    pace: list[float] = field(default_factory=lambda: [1.0])
    attempts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of_plans(
        cls,
        prior: LearnedCostModel,
        plans: Sequence[StartPlan],
        *,
        budget_s: float,
        ranks_per_host: int,
    ) -> Chooser:
        """Build the chooser of a first start under the prior of its hardware."""
        known = [plan.shapes(prior.device, ranks_per_host) for plan in plans]
        seconds = [_expected_s(prior, workload, hosts) for workload, hosts in known]
        return cls(Design(prior, known, seconds), seconds, NEW_SHARE * budget_s)

    def next(self, spent_s: float, left_s: float) -> tuple[int, int] | None:
        """Return a plan that fits the time and how often it was measured; None if none fits."""
        within_s = left_s / max(self.pace[-3:])
        fitting = [index for index, seconds in enumerate(self.seconds) if seconds <= within_s]
        new = [index for index in fitting if index not in self.attempts]
        if new and (spent_s < self.new_s or not self.attempts):
            return self.design.best(new), 0
        known = [index for index in self.attempts if index in fitting]
        index = min(known, key=self.attempts.__getitem__, default=None)
        if index is None or self.attempts[index] >= MAX_ATTEMPTS:
            return None
        return index, self.attempts[index]

    def note(self, index: int, seconds: float) -> None:
        """Note a measurement and the time that it took."""
        self.pace.append(seconds / self.seconds[index])
        if index not in self.attempts:
            self.design.measured(index)
        self.attempts[index] = self.attempts.get(index, 0) + 1


def measure_plans(
    plans: Sequence[StartPlan],
    chooser: Chooser | None,
    measure: Callable[[StartPlan, int], Sample | None],
    *,
    budget_s: float,
    decide: Decide,
    started_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Measure the plans that tell most, in at most so many seconds; all ranks call it together.

    Args:
        chooser: of rank 0, which shows a bar; None on the other ranks.
        measure: measures a plan, which has been measured so many times; None where this rank takes
            no part.
        budget_s: time of all that is done, from `started_s` on.
        started_s: beginning by the `clock`; None for now.
    """
    started_s = clock() if started_s is None else started_s
    within_s = (1.0 - FIT_SHARE) * budget_s
    found: dict[int, list[Sample]] = {}

    def choose() -> tuple[int, int] | None:
        assert chooser is not None, "it is called on rank 0 alone"
        spent_s = clock() - started_s
        return chooser.next(spent_s, within_s - spent_s)

    with ProgressBar(total=1.0, bar_format=BAR_FORMAT, disable=chooser is None) as bar:
        while (chosen := decide(choose)) is not None:
            index, attempt = chosen
            began_s = clock()
            sample = measure(plans[index], attempt)
            if chooser is not None:
                chooser.note(index, clock() - began_s)
            if sample is not None:
                found.setdefault(index, []).append(sample)
            spent_s = clock() - started_s
            bar.set_postfix_str(f"{spent_s:.0f} of {budget_s:.0f} s", refresh=False)
            bar.update(min(spent_s / budget_s, 1.0) - bar.n)
    return Measured(
        samples=tuple(_median(samples) for samples in found.values()),
        num_measurements=sum(map(len, found.values())),
        seconds=clock() - started_s,
        change=_change(found),
    )


def _expected_s(prior: LearnedCostModel, workload: Workload, hosts: Hosts) -> float:
    """Return the time of a measurement as the prior has it."""
    cost = prior.predict_workload(workload, hosts)
    once_s = (cost.critical_path_ms + (cost.input_dist_max_ms or 0.0)) / 1e3
    num_drawn = MEASURE.num_batches * float(workload.num_ids.sum()) / hosts.world_size
    num_timed = MEASURE.warmup + MEASURE.iterations
    timed_s = max(min(num_timed * once_s, MEASURE.time_budget_s), 4 * once_s)
    return BUILD_S + ID_S * num_drawn + timed_s


def _median(samples: Sequence[Sample]) -> Sample:
    """Return a plan with the medians of its measured times."""
    first, costs = samples[0], [sample.cost for sample in samples]

    def median(times: Sequence[Sequence[float]]) -> list[float]:
        medians: list[float] = np.median(times, axis=0).tolist()
        return medians

    ids_ms = median([cost.input_dist_ms or () for cost in costs])
    cost = costs[0].with_stages(
        {
            stage: median([[rank.stage_ms(stage) for rank in cost.per_rank] for cost in costs])
            for stage in STAGES
        }
    )
    return dataclasses.replace(first, cost=dataclasses.replace(cost, input_dist_ms=tuple(ids_ms)))


def _change(found: Mapping[int, Sequence[Sample]]) -> float | None:
    """Return the median factor between the first two measurements of a plan's computation."""
    logs = []
    for samples in found.values():
        if len(samples) > 1:
            first, second = (
                sum(rank.computation_ms for rank in sample.cost.per_rank) for sample in samples[:2]
            )
            logs.append(abs(math.log(second / first)))
    return math.exp(float(np.median(logs))) if logs else None


def disturbance(
    measured: Measured, *, load: float, core_wait: float, max_load: float
) -> str | None:
    """Say which other work the measurements were made beside; None if there was little.

    Args:
        load: processes that ran or waited on a host before.
        core_wait: share of the time in which other processes had a rank's core.
        max_load: the load of a host up to which a measurement counts as undisturbed.
    """
    if load > max_load:
        return f"the load average was {load:.1f} on {os.cpu_count()} cores"
    if core_wait > MAX_CORE_WAIT:
        return f"other processes had the core of a rank for {100 * core_wait:.0f} % of the time"
    if measured.change is not None and measured.change > CHANGE:
        return f"the same plan took {measured.change:.2f} times as long when measured again"
    return None
