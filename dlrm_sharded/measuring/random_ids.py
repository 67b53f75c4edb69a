"""Draws random ids for the tables of random plans, from the tables' patterns of accesses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.accesses.zipf import scatter_ranks
from dlrm_sharded.measuring.drawn_table import DrawnTable


def draw_batch(
    tables: Sequence[DrawnTable], num_samples: int, rng: np.random.Generator, *, batch_size: int
) -> KeyedJaggedTensor:
    """Draw the ids of one batch; each sample has the mean number of ids, rounded up or down.

    Args:
        num_samples: samples of one rank.
        batch_size: samples of all ranks, whose accesses a pattern describes.
    """
    values, lengths = [], []
    for i, table in enumerate(tables):
        length = np.floor(table.pooling_factor + rng.random(num_samples)).astype(np.int32)
        bits = rng.integers(0, 2**64, size=length.sum(), dtype=np.uint64)
        num_ids = batch_size * table.pooling_factor
        ranks = table.accesses.distribution(table.num_rows, num_ids).ranks(bits)
        values.append(scatter_ranks(ranks, table.num_rows, shift=i).astype(np.int32))
        lengths.append(length)
    return KeyedJaggedTensor(
        keys=[f"t{i}" for i in range(len(tables))],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
        # given here, as datasets do, so that nobody waits for a GPU to compute them
        length_per_key=[int(length.sum()) for length in lengths],
    )
