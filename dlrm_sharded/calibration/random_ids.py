"""Draws random ids for the tables of random plans, from the Zipf distributions of the tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.calibration.random_plans import DrawnTable
from dlrm_sharded.zipf import cached_zipf, scatter_ranks


def draw_batch(
    tables: Sequence[DrawnTable], num_samples: int, rng: np.random.Generator
) -> KeyedJaggedTensor:
    """Draw the ids of one batch; each sample has the mean number of ids, rounded up or down."""
    values, lengths = [], []
    for i, table in enumerate(tables):
        length = np.floor(table.pooling_factor + rng.random(num_samples)).astype(np.int32)
        bits = rng.integers(0, 2**64, size=length.sum(), dtype=np.uint64)
        ranks = cached_zipf(table.num_rows, table.exponent).ranks(bits)
        values.append(scatter_ranks(ranks, table.num_rows, shift=i).astype(np.int32))
        lengths.append(length)
    return KeyedJaggedTensor(
        keys=[f"t{i}" for i in range(len(tables))],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )
