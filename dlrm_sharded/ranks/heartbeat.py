"""A rank says its progress: it beats after every step, and rests in phases without steps.

beat: a step has ended.
rest: time in which no step is expected to end, such as loading, compilation and evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

OnStall = Callable[[float, int, str], None]
"""Called with the seconds without progress, the last step that has ended, and words about both."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The end of a step, at `at_s` of the monotonic clock; the step took `interval_s`."""

    step: int
    at_s: float
    interval_s: float


class Heartbeat:
    """The last beat of this process, which another thread reads; it rests until the first one."""

    def __init__(self) -> None:
        self.last: Beat | None = None
        """None at rest."""
        self.on_stall: OnStall | None = None

    def beat(self, step: int) -> None:
        """Note that a step has ended."""
        now_s = time.monotonic()
        interval_s = 0.0 if self.last is None else now_s - self.last.at_s
        self.last = Beat(step, now_s, interval_s)

    @contextmanager
    def steps(self, on_stall: OnStall) -> Iterator[None]:
        """Rest after the block, whose first beat begins the time in which steps are expected."""
        self.on_stall = on_stall
        try:
            yield
        finally:
            self.last = self.on_stall = None

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Rest within the block, and count its end as a beat if there was one before."""
        last, self.last = self.last, None
        try:
            yield
        finally:
            self.last = last and replace(last, at_s=time.monotonic())
