"""The rules that stop a search."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """The one deadline of a search, at which everything stops.

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
        clock: its deadline has passed.
        good_ms: the objective is at most this.
        patience: each walk ends after this many rebuilds in a row, or a multiple for few units (see
            `Effort`), without a better plan; the plan then does not depend on the machine's speed.
    """

    clock: Clock
    good_ms: float
    patience: int

    def ends_at(self, objective_ms: float) -> bool:
        """Return whether a search that has a plan with this objective may end."""
        return objective_ms <= self.good_ms or self.clock.is_over
