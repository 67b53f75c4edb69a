"""Times the reading of batches."""

from __future__ import annotations

import time

import numpy as np
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import BatchStream

NUM_READ = 32
"""Largest number of batches whose reading is timed."""


def read_batches(
    stream: BatchStream, *, first_step: int, num_steps: int, budget_s: float, num_kept: int
) -> tuple[list[Batch], float]:
    """Read some batches of a training; return a few of them, and the mean time to read one in ms.

    A dataset may keep some batches in memory and have to make others. So those that are read are
    spread over the training, in a random order that is always the same. The first one does not
    count: it may open files, or generate batches ahead.

    Args:
        stream: is left at another place.
        first_step, num_steps: steps of the training; each takes a batch.
        budget_s: time after which no more batches are read, but for the second one.
        num_kept: largest number of batches to return.
    """
    num_steps = max(2, num_steps)  # the first one alone would be the time to make all of them
    steps = np.linspace(first_step, first_step + num_steps - 1, min(num_steps, 1 + NUM_READ))
    batches: list[Batch] = []
    times_s: list[float] = []
    for step in np.random.default_rng(0).permutation(steps.astype(int)).tolist():
        stream.seek(step)
        started = time.perf_counter()
        batch = next(stream)
        times_s.append(time.perf_counter() - started)
        if len(batches) < num_kept:
            batches.append(batch)
        if sum(times_s[1:]) > budget_s:
            break
    return batches, 1e3 * float(np.mean(times_s[1:]))
