"""Lets the ranks decide together, between two batches, to stop or to write a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dlrm_sharded.ranks.distributed import Rank, new_group
from dlrm_sharded.ranks.process import kept_signals, set_handlers

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals by which schedulers announce that a job is about to end, and a terminal's hangup."""

INTERVAL_S = 0.5
"""Time between two meetings if one takes up to `USUAL_S`; longer ones increase it in proportion."""

USUAL_S = 1e-3
MOST_INTERVALS = 10
"""Largest factor of that increase. Schedulers send signals at least 25 s before a job ends."""

MOST_BATCHES = 1000
"""Largest number of batches between two meetings."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Says what all ranks do after a batch.

    Args:
        stop: signal that asks training to stop; None if there was none.
        saves: whether a checkpoint is due by the clock.
        must_end: whether a rank knows that training cannot continue.
    """

    stop: signal.Signals | None = None
    saves: bool = False
    must_end: bool = False


class Meeting:
    """Gathers signals and the time since the last checkpoint, twice a second or less often.

    A signal reaches the ranks at different batches, and their clocks differ. So the ranks meet
    after a batch that rank 0 has chosen at the meeting before, and do what any of them asks for.

    Args:
        every_s: time between checkpoints on the clock of rank 0; None for none by the clock.
    """

    def __init__(self, rank: Rank, *, every_s: float | None) -> None:
        self._rank = rank
        self._every_s = every_s
        self._group = new_group(backend="gloo")
        self._received: signal.Signals | None = None
        self._batches_left = self._batches_between = 1
        self._last_s = self._last_saved_s = time.monotonic()
        self._fastest_s = 0.0

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Record signals within the block, instead of ending at once."""

        def receive(number: int, frame: object) -> None:
            self._received = signal.Signals(number)

        with kept_signals(STOP_SIGNALS):
            numbers = (n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN)
            set_handlers(dict.fromkeys(numbers, receive))  # nohup ignores SIGHUP
            yield

    def after_batch(self, *, may_save: bool, must_end: bool = False) -> Decision:
        """Return what to do after a batch, which is nothing between two meetings.

        All ranks call this after every batch, in training and in evaluations.

        Args:
            may_save: whether this rank can begin a checkpoint by the clock.
            must_end: whether this rank knows that training cannot continue.
        """
        self._batches_left -= 1
        if self._batches_left:
            return Decision()
        now_s = time.monotonic()
        saves = num_batches = 0
        if self._rank.is_zero:
            is_due = self._every_s is not None and now_s - self._last_saved_s >= self._every_s
            saves = int(is_due and may_save)
            batch_s = (now_s - self._last_s) / self._batches_between
            num_batches = min(MOST_BATCHES, max(1, int(self._interval_s / max(batch_s, 1e-6))))
        votes = torch.tensor([int(self._received or 0), saves, num_batches, int(must_end)])
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group)
        spent_s = time.monotonic() - now_s
        self._fastest_s = min(self._fastest_s or spent_s, spent_s)
        stop, saves, num_batches, ends = votes.tolist()
        self._batches_left = self._batches_between = num_batches
        self._last_s = now_s
        return Decision(signal.Signals(stop) if stop else None, bool(saves), bool(ends))

    @property
    def _interval_s(self) -> float:
        """Time to the next meeting: meetings take at most 0.2 % of the time, up to the limit.

        A rank that comes late prolongs a meeting, so the fastest one counts.
        """
        return INTERVAL_S * min(max(self._fastest_s / USUAL_S, 1.0), MOST_INTERVALS)

    def has_saved(self) -> None:
        """Restart the clock of the next checkpoint."""
        self._last_saved_s = time.monotonic()
