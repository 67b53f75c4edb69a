"""The steps between two logs of a training."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_sharded.distributed import Rank, Stopwatch


class Window:
    """Losses and times of successive steps, which a host can read later than the device has them.

    Args:
        first_step: number of steps before the first one.
        watch: stopwatch that runs already; None starts one when the device is done.
    """

    def __init__(self, first_step: int, rank: Rank, watch: Stopwatch | None = None) -> None:
        self.first_step = first_step
        self.data_wait_ms = 0.0
        self._rank = rank
        self._losses: list[Tensor] = []
        if watch is None:
            watch = Stopwatch(rank.device)
            watch.mark()
        self._watch = watch

    def add(self, loss: Tensor) -> None:
        """Add the step that was issued last, and its loss []."""
        self._losses.append(loss)
        self._watch.mark()

    def close(self, data_wait_ms: float) -> Window:
        """Begin to average the losses over all ranks, which call it together.

        Args:
            data_wait_ms: time that a step waited for its batch.

        Returns:
            The window of the next steps.
        """
        self.data_wait_ms = data_wait_ms
        self._sums = torch.stack(self._losses).float()
        self._reduction = dist.all_reduce(self._sums, async_op=True)
        self._is_read = None
        if self._rank.device.type == "cuda":
            self._reduction.wait()  # the device waits; the host goes on
            self._sums = self._sums.to("cpu", non_blocking=True)
            self._is_read = torch.cuda.current_stream().record_event()
        return Window(self.first_step + len(self._losses), self._rank, self._watch.restarted())

    def mean_losses(self) -> Tensor:
        """Return [number of steps], on the CPU, the loss of each step in the mean of all ranks."""
        if self._is_read is None:
            self._reduction.wait()
        else:
            self._is_read.synchronize()
        return self._sums / self._rank.world_size

    def step_ms(self) -> list[float]:
        """Return the time of each step in ms."""
        return self._watch.intervals_ms()
