"""How the features of a sample interact: dot products of all pairs, or a cross network.

Both take the vectors of all features at once. The dense features' vector is the first.

Letters: B batch, N feature vectors of a sample, D their dim, P = N (N - 1) / 2 pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dlrm_sharded.model.dense_layers import CrossLayers


class DotInteraction(nn.Module):
    """The first vector of a sample, followed by the dot products of all pairs of its vectors.

    This is the interaction of DLRM (arXiv:1906.00091, sec. 2.1.3), in the order of TorchRec's.
    """

    def __init__(self, num_vectors: int, *, device: torch.device) -> None:
        super().__init__()
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1, device=device)
        self.num_pairs = len(first)
        # The diagonal has no pair: its gradients come from a column of zeros after the pairs.
        pair_of = torch.full((num_vectors, num_vectors), self.num_pairs, device=device)
        pairs = torch.arange(self.num_pairs, device=device)
        pair_of[first, second], pair_of[second, first] = pairs, pairs
        self.register_buffer("_place_of_pair", first * num_vectors + second, persistent=False)
        self.register_buffer("_pair_of_place", pair_of.flatten(), persistent=False)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return [B, D + P] for vectors [B, N, D]."""
        return _FirstAndProducts.apply(vectors, self._place_of_pair, self._pair_of_place)


class CrossInteraction(nn.Module):
    """DCNv2's low-rank cross network (arXiv:2008.13535, sec. 3.4) over all vectors of a sample."""

    def __init__(self, num_vectors: int, dim: int, *, num_layers: int, rank: int) -> None:
        super().__init__()
        self.crossnet = CrossLayers(num_vectors * dim, num_layers=num_layers, low_rank=rank)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return [B, N D] for vectors [B, N, D]."""
        return self.crossnet(vectors.flatten(1))


class _FirstAndProducts(torch.autograd.Function):
    """The first of N vectors [B, N, D], and the dot products of all pairs of them.

    The matrix of all products is symmetric, so one matrix product gives its gradient. Autograd
    would treat the two factors as different matrices, with a product for each, and would scatter
    the gradients to their places one by one.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, place_of_pair: Tensor, pair_of_place: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, pair_of_place)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([vectors[:, 0], products.index_select(1, place_of_pair)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        vectors, pair_of_place = ctx.saved_tensors
        num_vectors, dim = vectors.shape[1:]
        of_pairs = nn.functional.pad(gradient[:, dim:], (0, 1))
        symmetric = of_pairs.index_select(1, pair_of_place).view(-1, num_vectors, num_vectors)
        of_vectors = torch.bmm(symmetric, vectors)
        of_vectors[:, 0] += gradient[:, :dim]
        return of_vectors, None, None
