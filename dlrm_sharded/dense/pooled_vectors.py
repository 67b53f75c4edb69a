"""Stand-ins for ids and for the lookup of all tables: the dense part of a model runs alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.plans.tables import Table


def batch_without_ids(dense_features: Tensor, labels: Tensor) -> Batch:
    """Return a batch of [B, num_dense] and [B], as the dense part looks nothing up."""
    no_ids = KeyedJaggedTensor(
        keys=[], values=torch.empty(0), lengths=torch.empty(0, dtype=torch.int32)
    )
    return Batch(dense_features=dense_features, sparse_features=no_ids, labels=labels)


class PooledVectors(nn.Module):
    """Returns the same vectors at every lookup, as a leaf that needs a gradient.

    Args:
        num_samples: B, of one rank.
        device: where the vectors are; by default where the lookup happens, without any values.
    """

    def __init__(
        self, tables: Sequence[Table], num_samples: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self._names = [table.name for table in tables]
        self._dims = [table.embedding_dim for table in tables]
        self._shape = (num_samples, sum(self._dims))
        # Values that arithmetic is as fast on as on real ones; those of new memory may not be.
        self._values = None if device is None else torch.randn(self._shape, device=device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled vectors, [B, sum of the tables' dims]."""
        values: Tensor = torch.empty(self._shape) if self._values is None else self._values.detach()
        return KeyedTensor(self._names, self._dims, values.requires_grad_())


def replace_lookups(model: Dlrm, vectors: PooledVectors) -> None:
    """Let a model take these vectors, and train its dense part by autograd, part by part."""
    model.add_module("sparse_arch", vectors)
    model.dense_graph = None
