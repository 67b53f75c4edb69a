"""When a search stops."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Says when the time for a search is over.

    Args:
        deadline: a time of `time.perf_counter`.
    """

    deadline: float

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.deadline


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When a search stops: at the first of these.

    Args:
        patience: each part of the search ends after this many rebuilds in a row without a better
            plan; the plan then does not depend on the speed of the machine.
        good_gap: the objective is within this distance of the lower bound, relative to it.
        clock: its time is over.
    """

    patience: int
    good_gap: float
    clock: Clock
