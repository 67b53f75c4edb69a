"""Processes that compute beside a measurement, as the other ranks of a host do.

Ranks on the cores of one CPU share its caches and its memory bandwidth, so a rank that is measured
by itself looks faster than it is beside others.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dlrm_sharded.ranks.workers import end_on_signals

NUM_ROWS, NUM_COLS = 2**20, 64
"""Size of a neighbor's table of fp32 numbers: 256 MiB, more than the caches."""

NUM_IDS = 2**14
"""Rows that a neighbor reads and writes at a time."""


@contextmanager
def busy_neighbors(count: int) -> Iterator[None]:
    """Let so many processes look up and update random rows until the block ends."""
    context = multiprocessing.get_context("fork")  # a new process would load torch for seconds
    ready = context.Semaphore(0)
    processes = [
        context.Process(target=_compute, args=(seed, ready), daemon=True) for seed in range(count)
    ]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            ready.acquire()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute(seed: int, ready: multiprocessing.synchronize.Semaphore) -> None:
    end_on_signals()
    rng = np.random.default_rng(seed)
    table = np.ones((NUM_ROWS, NUM_COLS), dtype=np.float32)
    ready.release()
    while True:
        ids = rng.integers(NUM_ROWS, size=NUM_IDS)
        rows = table[ids]
        table[ids] = 0.5 * (rows + rows.mean(axis=0))
