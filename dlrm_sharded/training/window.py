"""Losses and times of the steps between two logs, which the host reads later than a GPU is done."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_sharded.datasets.id_check import IdFault
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.stopwatch import Stopwatch


class Window:
    """Gathers the losses and times of successive steps.

    Args:
        first_step: number of steps before the first one.
        watch: a running stopwatch; None starts one when the device is done.
        earlier: [number of steps], losses of this rank that an interrupted run did not log.
    """

    def __init__(
        self,
        first_step: int,
        rank: Rank,
        watch: Stopwatch | None = None,
        *,
        earlier: Sequence[Tensor] = (),
    ) -> None:
        self.first_step = first_step
        self.first_timed_step = first_step + len(earlier)
        self.rank = rank
        self._losses: list[Tensor] = list(earlier)
        if watch is None:
            watch = Stopwatch(rank.device)
            watch.mark()
        self.watch = watch

    def add(self, loss: Tensor) -> None:
        """Add the step that was launched last, and its loss []."""
        self._losses.append(loss)
        self.watch.mark()

    @property
    def num_steps(self) -> int:
        """Number of steps whose losses were added."""
        return len(self._losses)

    @property
    def losses(self) -> Tensor:
        """Losses of this rank's steps so far, [number of steps]."""
        return torch.stack(self._losses) if self._losses else torch.empty(0)

    def following(self) -> Window:
        """Return the window of the next steps, timed from the end of this one."""
        return Window(self.first_step + self.num_steps, self.rank, self.watch.restarted())


class ClosedWindow:
    """Losses and times of the steps of a window. Reading them waits for the device.

    Making one starts an all-reduce of the losses, so all ranks make it together.

    Args:
        data_wait_ms: median time that a step waited for its batch.
        is_traced: whether a profiler slows the steps down.
        faults: what is wrong with the ids of this rank's batches, by number of the batch.
    """

    def __init__(
        self,
        window: Window,
        *,
        data_wait_ms: float = 0.0,
        is_traced: bool = False,
        faults: Sequence[tuple[int, IdFault]] = (),
    ) -> None:
        self.first_step = window.first_step
        self.first_timed_step = window.first_timed_step
        self.data_wait_ms = data_wait_ms
        self.is_traced = is_traced
        self.faults = faults
        self._watch = window.watch
        self._world_size = window.rank.world_size
        losses = window.losses.float()
        losses = torch.cat([losses, losses.new_full((1,), float(len(faults)))])
        reduction = dist.all_reduce(losses, async_op=True)
        if window.rank.device.type == "cuda":
            reduction.wait()  # the device waits; the host goes on
            losses = losses.to("cpu", non_blocking=True)
            self._wait = torch.cuda.current_stream().record_event().synchronize
        else:
            self._wait = reduction.wait
        self._sums = losses

    def mean_losses(self) -> Tensor:
        """Return [number of steps], on the CPU, the loss of each step, averaged over all ranks."""
        self._wait()
        return self._sums[:-1] / self._world_size

    def has_faults(self) -> bool:
        """Return whether the ids of any rank's batches have faults."""
        self._wait()
        return bool(self._sums[-1] > 0)

    def step_ms(self) -> list[float]:
        """Return the time of each step in ms, from `first_timed_step` on."""
        return self._watch.intervals_ms()
