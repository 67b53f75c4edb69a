"""The predicted step of a plan, and how far the prediction may be off."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.step.breakdown import Breakdown, breakdown
from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.host_time import HostTime
from dlrm_sharded.step.parts import HOST_WAIT, DenseTimes
from dlrm_sharded.step.schedule import Overlap, step_operations
from dlrm_sharded.step.timeline import Timeline, run_steps

NUM_STEPS = 30
"""Steps of a simulation; their times vary as those of the dense part were measured to."""

COMPOSITION_ERROR = 0.06
"""Relative error of a step that is composed of measured parts."""

SHARING_ERROR = 0.2
"""Relative error of a step whose ranks share cores; they are shared with some loss."""


@dataclass(frozen=True, slots=True)
class StepCorrection:
    """A correction of composed steps, which earlier runs on this hardware suggest.

    Args:
        factor: measured steps relative to composed ones.
        error: relative error of corrected steps whose parts are known.
        num_runs: number of the runs.
    """

    factor: float = 1.0
    error: float = COMPOSITION_ERROR
    num_runs: int = 0


NO_CORRECTION = StepCorrection()


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A step that is composed of its parts.

    Args:
        breakdown: parts of the step on every rank; they sum to it.
        batch_size: global.
        error: expected relative error of the step; None if that of the plan's cost is not known.
        host: time that the host needs for a step on GPUs; None on CPUs, which are their own hosts.
    """

    breakdown: Breakdown
    batch_size: int
    error: float | None = None
    host: HostTime | None = None

    @property
    def step_ms(self) -> float:
        """Mean time of a step."""
        return self.breakdown.step_ms

    @property
    def device_ms(self) -> float:
        """Mean time that the devices need for a step, without waiting for their hosts."""
        return self.step_ms - self.breakdown.mean_ms(HOST_WAIT)

    @property
    def host_ms(self) -> float | None:
        """Time that the host needs for a step on GPUs; None on CPUs."""
        return None if self.host is None else self.host.ms

    @property
    def bounding_host(self) -> HostTime | None:
        """The host's time if it needs more than the devices; else None."""
        return self.host if self.breakdown.mean_ms(HOST_WAIT) > 0 else None

    @property
    def samples_per_s(self) -> float:
        """Throughput of all ranks."""
        return 1e3 * self.batch_size / self.step_ms


@dataclass(frozen=True, slots=True)
class DensePart:
    """The part of a step that does not depend on the plan of the embeddings.

    Args:
        by_rank: times of every rank.
        all_reduce_ms: time of the all-reduce of its gradients.
        error: expected relative error of the times; 0 if they were measured here.
    """

    by_rank: tuple[DenseTimes, ...]
    all_reduce_ms: float
    error: float = 0.0

    @property
    def mean_ms(self) -> float:
        """Time of one step, averaged over all ranks, without the all-reduce."""
        return sum(times.total_ms for times in self.by_rank) / len(self.by_rank)


def predict_step(
    cost: PlanCost,
    dense: DensePart,
    *,
    overlap: Overlap,
    batch_size: int,
    cost_error: float | None = None,
    correction: StepCorrection = NO_CORRECTION,
    seed: int = 0,
    sharing: CoreSharing | None = None,
    host: HostTime | None = None,
) -> StepPrediction:
    """Predict the step of a plan from its predicted or measured cost.

    Args:
        cost_error: expected relative error of the cost's critical path; None if it is not known.
        correction: of steps that are composed of their parts, from earlier runs.
        seed: seed of the variation of times over steps.
        sharing: the cores that the ranks of a host share; None if each has its own.
        host: time that the host needs on GPUs; None on CPUs.
    """
    timeline = simulated_steps(cost, dense, overlap=overlap, seed=seed, sharing=sharing)
    found = breakdown(timeline).waiting_longer(cost.excess_ms)
    if host is not None:
        found = found.launched_in(host.ms)
    step = StepPrediction(found, batch_size, host=host)
    error = None
    if cost_error is not None:
        error = step_error(
            step,
            priced=(cost.critical_path_ms, cost_error),
            dense=(dense.mean_ms, dense.error),
            composition_error=correction.error,
            sharing_error=0.0 if sharing is None else SHARING_ERROR,
        )
    return StepPrediction(
        found.scaled(correction.factor),
        batch_size,
        error,
        host and dataclasses.replace(host, factor=correction.factor),
    )


def step_error(
    step: StepPrediction,
    *,
    priced: tuple[float, float],
    dense: tuple[float, float],
    composition_error: float = COMPOSITION_ERROR,
    sharing_error: float = 0.0,
) -> float:
    """Return the expected relative error of a step.

    Args:
        priced, dense: time of what the cost model predicts, and of the dense part, each with its
            relative error; neither counts if the host needs more time than the devices.
    """
    if (host := step.bounding_host) is not None:
        return math.hypot(host.error, composition_error)
    # parts that overlap can be longer than the step together
    errors = [min(1.0, part_ms / step.step_ms) * error for part_ms, error in (priced, dense)]
    return math.hypot(*errors, composition_error, sharing_error)


def simulated_steps(
    cost: PlanCost,
    dense: DensePart,
    *,
    overlap: Overlap,
    seed: int = 0,
    num_steps: int = NUM_STEPS,
    sharing: CoreSharing | None = None,
) -> Timeline:
    """Return the timeline of some steps under a plan, on devices that never wait for a host."""
    operations = step_operations(
        cost, dense.by_rank, all_reduce_ms=dense.all_reduce_ms, overlap=overlap
    )
    return run_steps(operations, num_steps=num_steps, seed=seed, sharing=sharing)
