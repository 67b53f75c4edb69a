"""Where more ranks stop to pay off, and which part of the step is the reason."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_sharded.advice.candidates import Candidate
from dlrm_sharded.step.parts import PARTS

LEAST_GAIN = 0.5
"""More ranks pay off if they give at least this part of the ideal gain."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The step from one size to the next that does not pay off.

    Args:
        beyond: candidate with more ranks than pay off.
        gain: growth of the throughput relative to that of the ranks.
        part: the part whose share of the step grows most.
    """

    beyond: Candidate
    gain: float
    part: str


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
            grown = {part: beyond.share(part) - last.share(part) for part in PARTS}
            part = max(grown, key=grown.__getitem__)
            return Scaling(last, Limit(beyond, gain, part), len(sizes))
    return Scaling(sizes[-1], None, len(sizes))


def gain_of(fewer: Candidate, more: Candidate) -> float:
    """Return the growth of the throughput relative to that of the ranks."""
    growth = more.samples_per_s / fewer.samples_per_s - 1
    return growth / (more.case.num_ranks / fewer.case.num_ranks - 1)
