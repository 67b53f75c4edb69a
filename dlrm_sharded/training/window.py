"""The steps between two logs of a training, which a host can read later than a GPU takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.stopwatch import Stopwatch


class Window:
    """Gathers the losses and times of successive steps.

    Args:
        first_step: number of steps before the first one.
        watch: stopwatch that runs already; None starts one when the device is done.
        earlier: [number of steps], losses of this rank that an interrupted training did not log.
    """

    def __init__(
        self,
        first_step: int,
        rank: Rank,
        watch: Stopwatch | None = None,
        *,
        earlier: Sequence[Tensor] = (),
    ) -> None:
        self._first_step = first_step
        self._num_earlier = len(earlier)
        self._rank = rank
        self._losses: list[Tensor] = list(earlier)
        if watch is None:
            watch = Stopwatch(rank.device)
            watch.mark()
        self._watch = watch

    def add(self, loss: Tensor) -> None:
        """Add the step that was issued last, and its loss []."""
        self._losses.append(loss)
        self._watch.mark()

    @property
    def num_steps(self) -> int:
        """Number of steps whose losses it has."""
        return len(self._losses)

    @property
    def losses(self) -> Tensor:
        """Losses of this rank's steps so far, [number of steps]."""
        return torch.stack(self._losses) if self._losses else torch.empty(0)

    def close(self, data_wait_ms: float, *, is_traced: bool = False) -> ClosedWindow:
        """Begin to average the losses over all ranks, which call it together.

        Args:
            data_wait_ms: time that a step waited for its batch.
            is_traced: whether a profiler slows the steps down.
        """
        losses = torch.stack(self._losses).float()
        return ClosedWindow(
            self._first_step,
            losses,
            self._watch,
            self._rank,
            data_wait_ms,
            num_earlier=self._num_earlier,
            is_traced=is_traced,
        )

    def following(self) -> Window:
        """Return the window of the next steps, whose times begin where those of this one end."""
        next_step = self._first_step + len(self._losses)
        return Window(next_step, self._rank, self._watch.restarted())


class ClosedWindow:
    """Losses and times of a number of steps. Whoever reads them waits for the device.

    Args:
        first_step: number of steps before the first one.
        losses: [number of steps], of this rank, on its device.
        data_wait_ms: time that a step waited for its batch.
        num_earlier: number of first steps that an earlier training has taken, without their times.
        is_traced: whether a profiler slows the steps down.
    """

    def __init__(
        self,
        first_step: int,
        losses: Tensor,
        watch: Stopwatch,
        rank: Rank,
        data_wait_ms: float,
        *,
        num_earlier: int = 0,
        is_traced: bool = False,
    ) -> None:
        self.first_step = first_step
        self.first_timed_step = first_step + num_earlier
        self.data_wait_ms = data_wait_ms
        self.is_traced = is_traced
        self._watch = watch
        self._world_size = rank.world_size
        reduction = dist.all_reduce(losses, async_op=True)
        if rank.device.type == "cuda":
            reduction.wait()  # the device waits; the host goes on
            losses = losses.to("cpu", non_blocking=True)
            self._wait = torch.cuda.current_stream().record_event().synchronize
        else:
            self._wait = reduction.wait
        self._sums = losses

    def mean_losses(self) -> Tensor:
        """Return [number of steps], on the CPU, the loss of each step, averaged over all ranks."""
        self._wait()
        return self._sums / self._world_size

    def step_ms(self) -> list[float]:
        """Return the time of each step in ms, from `first_timed_step` on."""
        return self._watch.intervals_ms()
