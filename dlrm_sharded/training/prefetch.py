"""Reads batches ahead of the training loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
import torch
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import page_locked


class Prefetcher(Iterator[Batch], AbstractContextManager["Prefetcher"]):
    """Reads the next batches of an iterator in a thread, and measures how long its user waits.

    The iterator runs ahead of its user. So a resumed run must seek to the batch of its step, not
    to the iterator's position.

    Args:
        depth: number of batches that are read ahead; 0 reads each on demand, without a thread.
        device: on CUDA, batches are moved to page-locked memory, from which a GPU copies while it
            computes.
        shares_with: prefetcher of the same dataset and depth, whose thread reads for both.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        *,
        depth: int,
        device: torch.device,
        shares_with: Prefetcher | None = None,
    ) -> None:
        self._batches = batches
        self._pins = device.type == "cuda"
        self._waits_s: list[float] = []
        self._ahead: deque[Future[Batch | None]] = deque()
        self._executor: ThreadPoolExecutor | None = shares_with._executor if shares_with else None
        if depth and not shares_with:
            # A new thread uses device 0, on which all ranks of the host would take memory.
            initializer = (torch.cuda.set_device, (device,)) if self._pins else ()
            self._executor = ThreadPoolExecutor(1, "prefetch", *initializer)
        if self._executor:
            self._ahead.extend(self._executor.submit(self._read) for _ in range(depth))

    def __next__(self) -> Batch:
        started = time.perf_counter()
        if self._executor is None:
            batch = self._read()
        else:
            batch = self._ahead.popleft().result()
            self._ahead.append(self._executor.submit(self._read))
        self._waits_s.append(time.perf_counter() - started)
        if batch is None:
            raise StopIteration
        return batch

    def __exit__(self, *error: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def take_wait_ms(self) -> float:
        """Return the median wait for a batch since the last call, in ms; 0 if there was none."""
        waits_s, self._waits_s = self._waits_s, []
        return 1e3 * float(np.median(waits_s)) if waits_s else 0.0

    def _read(self) -> Batch | None:
        """Return the next batch, or None at the end."""
        batch = next(self._batches, None)
        return page_locked(batch) if batch is not None and self._pins else batch
