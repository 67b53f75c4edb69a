"""Access profiles of a rank's own samples, which are what the replica of a table sees.

Tables are profiled over the global batch. Each use of an id there falls on a given rank with
probability 1 / W, so the number of uses that a rank sees is binomial.

Letters: W ranks, S shards.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.plans.tables import NUM_REUSE_BINS

Floats = NDArray[np.float64]

USES_OF_BIN = np.concatenate([[1.0, 2.0], 2.0 ** np.arange(1, NUM_REUSE_BINS - 1) * 1.5])
"""[17], uses of an id in the middle of each bin: (0, 1], (1, 2], (2, 4], ..."""


def local_histograms(histograms: Floats, world_size: int) -> Floats:
    """Return [S, 17], reuse histograms of a rank's samples, given the global batch's."""
    if world_size == 1:
        return histograms
    expected = histograms @ _transitions(world_size)
    # The shares are of those ids that the rank uses at all; a table without a profile has zeros.
    return expected / np.maximum(expected.sum(axis=1, keepdims=True), 1e-300)


@functools.lru_cache(maxsize=64)
def _transitions(world_size: int) -> Floats:
    """Return [17, 17], probabilities that an id of one bin falls into another on a single rank."""
    share = 1.0 / world_size
    # the highest counts of the bins (0, 1], (1, 2], (2, 4], ...; the last bin has no end
    ends = 2 ** np.arange(NUM_REUSE_BINS - 1)
    most = int(USES_OF_BIN[-1])
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])
    transitions = np.zeros((NUM_REUSE_BINS, NUM_REUSE_BINS))
    for row, uses in enumerate(USES_OF_BIN.astype(int).tolist()):
        local = np.arange(uses + 1)
        log_ways = log_factorial[uses] - log_factorial[local] - log_factorial[uses - local]
        probability = np.exp(log_ways + local * np.log(share) + (uses - local) * np.log1p(-share))
        np.add.at(transitions[row], np.searchsorted(ends, local[1:]), probability[1:])
    return transitions
