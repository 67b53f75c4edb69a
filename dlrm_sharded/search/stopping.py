"""Rules that stop a search."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """The deadline of a search.

    Args:
        deadline: a time of `time.perf_counter`.
    """

    deadline: float

    @classmethod
    def starting_now(cls, budget_s: float | None) -> Clock:
        """Return the clock of a search that has a time budget; None for no limit."""
        return cls(math.inf if budget_s is None else time.perf_counter() + budget_s)

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.deadline


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Conditions that stop a search; the first that is met ends it.

    Args:
        patience: each part of the search ends after this many rebuilds in a row without a better
            plan; the plan then does not depend on the speed of the machine.
        good_gap: the objective is within this distance of the lower bound, relative to it.
        clock: its deadline has passed.
    """

    patience: int
    good_gap: float
    clock: Clock
