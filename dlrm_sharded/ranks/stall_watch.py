"""Notices that the main thread waits in one collective for too long.

Gloo runs collectives in two threads, and each one that is queued behind a hung one waits for a
timeout of its own. A rank may therefore learn of a timeout only after several of them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from dlrm_sharded.ranks.collective_names import frames_of, name_of_frames

SAMPLE_S = 0.5
"""Time between two looks at the main thread."""


class StallWatch:
    """A thread that calls `on_stall` with the name of the collective.

    An error of `on_stall` goes to `threading.excepthook`, which may end the process: the main
    thread cannot be interrupted.

    Args:
        limit_s: time in one collective that counts as a stall.
    """

    def __init__(self, limit_s: float, on_stall: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._main = threading.get_ident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall_watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the call of `on_stall` if there is one."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        last, since_s = None, 0.0
        while not self._end.wait(SAMPLE_S):
            sample = self._sample()
            if sample is None or sample != last:
                last, since_s = sample, time.monotonic()
            elif time.monotonic() - since_s > self._limit_s:
                # Only now, as to walk the stack of a thread that runs may end in SIGSEGV.
                name = name_of_frames(frames_of(sys._current_frames()[self._main]))
                if name is not None:
                    self._on_stall(name)
                    return
                since_s = time.monotonic()  # a long call outside of collectives

    def _sample(self) -> tuple[int, int, int] | None:
        """Return what stays the same only while the main thread waits; None without a group."""
        frame, group = sys._current_frames().get(self._main), dist.group.WORLD
        if frame is None or group is None:
            return None
        number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        return number, id(frame), frame.f_lasti
