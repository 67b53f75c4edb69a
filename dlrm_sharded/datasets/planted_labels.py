"""Dense features and labels for data without any, with a planted signal that models can learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import Split
from dlrm_sharded.datasets.counter_random import (
    counters,
    normals,
    random_bits,
    stream_key,
    uniforms,
)
from dlrm_sharded.plans.tables import Table

_SIGNAL_ROWS = 1000
"""Tables of about this size carry the signal: their ids are frequent enough to be learned."""

_BIAS, _DENSE_SCALE, _SPARSE_SCALE = -1.0, 1.0, 1.5
"""Terms of the logit. They make 30 to 45 % of the labels 1, and limit the AUROC to about 0.85."""

_SIGN_SHIFT = np.uint64(63)


class PlantedLabels:
    """Draws labels from a logit that is linear in the dense features and the ids of a few tables.

    Every id of a signal table adds a multiple of +1 or -1, divided by the square root of the number
    of ids that the sample has in this table. One column, pooled by a sum, can express this if that
    number is fixed. Features and labels depend only on the seed and the sample's number in its
    split.

    Letters: B samples, F dense features.
    """

    def __init__(
        self, tables: Sequence[Table], *, num_dense: int, seed: int, num_signal_tables: int = 4
    ) -> None:
        self._num_dense = num_dense
        self._seed = seed
        octaves = {t.name: float(abs(np.log2(t.num_embeddings / _SIGNAL_ROWS))) for t in tables}
        by_size = sorted(tables, key=lambda table: octaves[table.name])
        self.signal_tables = tuple(table.name for table in by_size[:num_signal_tables])
        weights = normals(stream_key(seed, "dense weights"), counters(0, num_dense))
        self._dense_weights = _DENSE_SCALE * weights / max(float(np.linalg.norm(weights)), 1e-12)

    def dense(self, split: Split, first: int, num_samples: int) -> Tensor:
        """Return [B, F] fp32, standard normal, for the samples first, first + 1, ..."""
        counter = counters(first * self._num_dense, num_samples * self._num_dense)
        values = normals(stream_key(self._seed, split, "dense"), counter)
        return torch.from_numpy(values.astype(np.float32)).view(num_samples, self._num_dense)

    def batch(self, split: Split, first: int, sparse: KeyedJaggedTensor) -> Batch:
        """Return the samples first, first + 1, ... with their features and labels."""
        dense = self.dense(split, first, sparse.stride())
        return Batch(dense, sparse, self.labels(split, first, dense, sparse))

    def logits(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return [B] fp64, the true logits of the label 1; no model can predict better."""
        logits = _BIAS + dense.double().numpy() @ self._dense_weights
        scale = _SPARSE_SCALE / max(1, len(self.signal_tables)) ** 0.5
        num_samples, offsets = dense.shape[0], sparse.offset_per_key()
        for name in self.signal_tables:
            key = sparse.keys().index(name)
            ids = sparse.values()[offsets[key] : offsets[key + 1]].numpy()
            lengths = sparse.lengths()[key * num_samples : (key + 1) * num_samples].numpy()
            sign_bits = random_bits(stream_key(self._seed, "effect", name), ids.astype(np.uint64))
            effects = 1.0 - 2.0 * (sign_bits >> _SIGN_SHIFT).astype(np.float64)
            sample = np.repeat(np.arange(num_samples), lengths)
            pooled = np.bincount(sample, weights=effects, minlength=num_samples)
            logits += scale * pooled / np.sqrt(np.maximum(lengths, 1))
        return torch.from_numpy(logits)

    def labels(self, split: Split, first: int, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return [B] fp32, 0 or 1, for the samples first, first + 1, ..."""
        uniform = uniforms(stream_key(self._seed, split, "label"), counters(first, dense.shape[0]))
        return (torch.from_numpy(uniform) < torch.sigmoid(self.logits(dense, sparse))).float()
