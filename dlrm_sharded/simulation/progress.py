"""Says from time to time how far a simulation is, and when it will be done."""

from __future__ import annotations

import logging
import time

EVERY_S = 15.0
"""Time between two messages."""

log = logging.getLogger(__name__)


class Progress:
    """Counts the ranks of one plan that are done, and the time that their measurements took.

    Args:
        name: what the messages begin with.
        total: largest number of ranks to measure.
        limit_s: time after which no further rank is measured.
    """

    def __init__(self, name: str, total: int, limit_s: float) -> None:
        self._name = name
        self._total = total
        self._limit_s = limit_s
        self._done = 0
        self._shown = time.monotonic()
        self.spent_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a rank that took so long, and log a message if the last one is old."""
        self._done += 1
        self.spent_s += seconds
        now = time.monotonic()
        if now - self._shown < EVERY_S or self._done == self._total:
            return
        self._shown = now
        left_s = self.spent_s / self._done * (self._total - self._done)
        log.info(
            "%s: %d of up to %d ranks measured, about %s left",
            self._name,
            self._done,
            self._total,
            duration_text(max(0.0, min(left_s, self._limit_s - self.spent_s))),
        )


def duration_text(seconds: float) -> str:
    """Write a duration in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
