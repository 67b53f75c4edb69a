"""Measures the time that work takes on a device."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Times work on a device, with events on CUDA and the monotonic clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Record when the work launched so far is done; on CUDA, the first call waits for it."""
        if self._on_cuda:
            if not self._marks:
                torch.cuda.synchronize()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def restarted(self) -> Stopwatch:
        """Return a stopwatch whose first mark is the last mark of this one."""
        watch = Stopwatch(self._device)
        watch._marks = self._marks[-1:]
        return watch

    def intervals_ms(self) -> list[float]:
        """Wait for the last mark and return the times between successive marks, in ms."""
        if self._on_cuda:
            self._marks[-1].synchronize()
            return [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        return [1e3 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]
