"""Planted dense features and labels, for data that has none: a signal a model can learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import Split
from dlrm_sharded.datasets.counter_random import normals, places, random_bits, stream_key, uniforms
from dlrm_sharded.tables import Table

_LEARNABLE_ROWS = 1000
"""Tables of about this size carry the signal: each id comes often enough to be learned soon."""

_BIAS, _DENSE_SCALE, _SPARSE_SCALE = -1.0, 1.0, 1.5
"""Of the logit: 30 to 45 % of the labels are 1, and the best AUROC possible is about 0.85."""

_SIGN_SHIFT = np.uint64(63)


class PlantedLabels:
    """Labels drawn from a logit that is linear in the dense features and in the ids of few tables.

    Every id of a signal table adds +1 or -1, over the square root of the ids the sample has in
    this table; this is what one embedding column, pooled by a sum, can express. All is a pure
    function of the seed and the sample's number in its split. B samples, F dense features.
    """

    def __init__(
        self, tables: Sequence[Table], *, num_dense: int, seed: int, num_signal_tables: int = 4
    ) -> None:
        self._num_dense = num_dense
        self._seed = seed
        by_size = sorted(tables, key=lambda table: _octaves_apart(table.num_embeddings))
        self.signal_tables = tuple(table.name for table in by_size[:num_signal_tables])
        weights = normals(stream_key(seed, "dense weights"), places(0, num_dense))
        self._dense_weights = _DENSE_SCALE * weights / max(float(np.linalg.norm(weights)), 1e-12)

    def dense(self, split: Split, first: int, num_samples: int) -> Tensor:
        """[B, F] fp32, standard normal, of the samples from number `first` on."""
        place = places(first * self._num_dense, num_samples * self._num_dense)
        values = normals(stream_key(self._seed, split, "dense"), place)
        return torch.from_numpy(values.astype(np.float32)).view(num_samples, self._num_dense)

    def logits(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """[B] fp64, of the probability of a 1: no model can do better."""
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
        """[B] fp32, 0 or 1, of the samples from number `first` on."""
        chance = uniforms(stream_key(self._seed, split, "label"), places(first, dense.shape[0]))
        return (torch.from_numpy(chance) < torch.sigmoid(self.logits(dense, sparse))).float()


def _octaves_apart(num_embeddings: int) -> float:
    return float(abs(np.log2(num_embeddings / _LEARNABLE_ROWS)))
