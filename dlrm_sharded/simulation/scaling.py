"""Where more ranks stop to pay off, and which part of the step is the reason."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_sharded.simulation.candidates import GROUPS, Candidate

LEAST_GAIN = 0.5
"""More ranks pay off if they give at least this part of the ideal gain."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The step from one size to the next that does not pay off.

    Args:
        beyond: candidate with more ranks than pay off.
        gain: growth of the throughput relative to that of the ranks.
        group: one of `candidates.GROUPS`, which adds the most time to that of ideal scaling.
        part: its part that adds the most.
        ideal_ms, ms: time of the group in an ideal step and in the predicted one.
    """

    beyond: Candidate
    gain: float
    group: str
    part: str
    ideal_ms: float
    ms: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a machine scales under a sharder.

    Args:
        last: candidate with the most ranks that pay off.
        limit: None if all sizes pay off.
        num_sizes: sizes that have an outcome.
    """

    last: Candidate
    limit: Limit | None
    num_sizes: int


def scaling_of(candidates: Sequence[Candidate], *, least_gain: float = LEAST_GAIN) -> Scaling:
    """Find where the candidates of one machine and sharder stop to scale.

    Args:
        candidates: at least one, all with an outcome, in any order.
        least_gain: see `LEAST_GAIN`.
    """
    sizes = sorted(candidates, key=lambda candidate: candidate.case.num_ranks)
    for last, beyond in itertools.pairwise(sizes):
        gain = gain_of(last, beyond)
        if gain < least_gain:
            return Scaling(last, _limit(last, beyond, gain), len(sizes))
    return Scaling(sizes[-1], None, len(sizes))


def gain_of(fewer: Candidate, more: Candidate) -> float:
    """Return the growth of the throughput relative to that of the ranks."""
    growth = more.samples_per_s / fewer.samples_per_s - 1
    return growth / (more.case.num_ranks / fewer.case.num_ranks - 1)


def _limit(last: Candidate, beyond: Candidate, gain: float) -> Limit:
    """Find the part of the step that takes the most time beyond that of ideal scaling.

    A part scales if it takes a rank equally long for a sample; its share of the step may still grow
    if other parts scale better than that.
    """
    per_rank = [c.case.batch_size / c.case.num_ranks for c in (last, beyond)]
    ratio = per_rank[1] / per_rank[0]
    before_ms, parts_ms = (c.outcome.step.breakdown.mean_parts_ms for c in (last, beyond))
    ideal_ms = {part: ratio * ms for part, ms in before_ms.items()}
    added_ms = {part: ms - ideal_ms[part] for part, ms in parts_ms.items()}
    group = max(GROUPS, key=lambda name: sum(added_ms[part] for part in GROUPS[name]))
    return Limit(
        beyond,
        gain,
        group,
        part=max(GROUPS[group], key=added_ms.__getitem__),
        ideal_ms=sum(ideal_ms[part] for part in GROUPS[group]),
        ms=sum(parts_ms[part] for part in GROUPS[group]),
    )
