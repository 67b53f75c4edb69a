"""Says from time to time how far a simulation is, and when it will be done."""

from __future__ import annotations

import logging
import time

EVERY_S = 15.0
"""Time between two messages."""

log = logging.getLogger(__name__)


class Progress:
    """Counts the ranks of one plan that are done.

    Args:
        name: what the messages begin with.
        total: number of ranks to measure.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._done = 0
        self._started = self._shown = time.monotonic()

    def add(self) -> None:
        """Count one rank, and log a message if the last one is old."""
        self._done += 1
        now = time.monotonic()
        if now - self._shown < EVERY_S or self._done == self._total:
            return
        self._shown = now
        left_s = (now - self._started) / self._done * (self._total - self._done)
        log.info(
            "%s: %d of %d ranks measured, about %s left",
            self._name,
            self._done,
            self._total,
            duration_text(left_s),
        )


def duration_text(seconds: float) -> str:
    """Write a duration in seconds or minutes."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
