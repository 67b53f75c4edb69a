"""A limit on the time of a search, with lines in the log while the search goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

log = logging.getLogger(__name__)

REPORT_EVERY_S = 15.0
"""Time between two lines about a search that goes on."""


class TimeBox:
    """Starts when it is made, and ends `limit_s` seconds later.

    Args:
        clock: returns seconds from any fixed moment.
    """

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._started = self._reported = clock()

    @property
    def elapsed_s(self) -> float:
        """Time since the start, in seconds."""
        return self._clock() - self._started

    @property
    def is_over(self) -> bool:
        """Return whether the limit has been reached."""
        return self.elapsed_s >= self.limit_s

    def report(self, progress: str) -> None:
        """Log the progress, unless the last line is younger than `REPORT_EVERY_S`."""
        now = self._clock()
        if now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            log.info("%s in %.0f s; the limit is %g s", progress, now - self._started, self.limit_s)
