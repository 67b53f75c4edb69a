"""Chooses a candidate, and says how sure the choice is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlrm_sharded.simulation.candidates import Candidate
from dlrm_sharded.simulation.scaling import Scaling, scaling_of
from dlrm_sharded.step.prediction import COMPOSITION_ERROR

Objective = Literal["time", "price"]

UNKNOWN_ERROR = 1.0
"""Relative error of a prediction whose error is not known."""

ERROR_GROUPS = (("lookups", "waiting"), ("exchanges",), ("dense",))
"""Groups of parts that share an error: ranks wait for the lookups of others."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate to take, and the others.

    Args:
        ranking: candidates that were compared, the best one first.
        tied: candidates whose distance from the best one their errors explain.
        scalings: how each machine scales under each sharder.
        asked: all candidates, those without an outcome too.
    """

    objective: Objective
    ranking: tuple[Candidate, ...]
    tied: tuple[Candidate, ...]
    scalings: tuple[Scaling, ...]
    asked: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.ranking[0]

    @property
    def runner_up(self) -> Candidate | None:
        return self.ranking[1] if len(self.ranking) > 1 else None

    def loss(self, other: Candidate) -> float:
        """Return how much more another candidate takes, relative to the best one."""
        return value_of(other, self.objective) / value_of(self.best, self.objective) - 1


def choose(candidates: Sequence[Candidate], *, least_gain: float) -> Choice:
    """Choose among candidates; at least one has an outcome.

    With prices, the cheapest one is the best. Without them the fastest one is, among the largest
    sizes of each machine and sharder that still scale.
    """
    by_curve: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in candidates:
        if candidate.is_feasible:
            by_curve.setdefault(candidate.case.curve, []).append(candidate)
    scalings = tuple(scaling_of(curve, least_gain=least_gain) for curve in by_curve.values())
    objective: Objective = "price"
    compared = [candidate for curve in by_curve.values() for candidate in curve]
    if any(candidate.case.machine.price is None for candidate in compared):
        objective, compared = "time", [scaling.last for scaling in scalings]
    # of steps that the host makes equal, that of the least work of the GPUs is the best
    compared.sort(key=lambda c: (value_of(c, objective), c.outcome.step.device_ms))
    best, *others = compared
    tied = [other for other in others if is_tied(best, other, objective)]
    return Choice(objective, tuple(compared), tuple(tied), scalings, tuple(candidates))


def value_of(candidate: Candidate, objective: Objective) -> float:
    """Return what a candidate takes for a sample: time in ms, or a price."""
    case = candidate.case
    ms = candidate.step_ms / case.batch_size
    if objective == "time":
        return ms
    assert case.machine.price is not None
    return ms * case.num_ranks * case.machine.price


def is_tied(best: Candidate, other: Candidate, objective: Objective) -> bool:
    """Return whether the errors of predictions explain the distance of a candidate from the best.

    On one machine, both have the same errors of lookups, exchanges and dense layers, so only what
    differs counts, beside the error of composing a step; of two steps that the host bounds, nothing
    else counts. Errors of two machines are factors that are taken to be independent.
    """
    values = [value_of(candidate, objective) for candidate in (best, other)]
    if best.case.machine != other.case.machine:
        factors = [math.log1p(_known(c.outcome.step.error)) for c in (best, other)]
        return math.log(values[1] / values[0]) <= math.hypot(*factors)
    is_host_bound = all(c.outcome.step.bounding_host for c in (best, other))
    uncertain = []
    for groups in () if is_host_bound else ERROR_GROUPS:
        first, second = (
            sum(candidate.group_share(group) for group in groups) * value
            for candidate, value in zip((best, other), values, strict=True)
        )
        is_dense = groups == ("dense",)
        cost_error = _known(best.outcome.planned.cost_error)
        error = best.case.machine.dense_error if is_dense else cost_error
        uncertain.append(error * (second - first))
    return values[1] - values[0] <= max(math.hypot(*uncertain), COMPOSITION_ERROR * values[0])


def _known(error: float | None) -> float:
    return UNKNOWN_ERROR if error is None else error
