"""Puts the vectors of a sample's features beside each other, whatever the dims of their tables.

Nothing of TorchRec is needed here, because an exported model is scored without it.

Letters: B batch, F features, D interaction dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlrm_sharded.plans.tables import Table, tables_by_feature

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedTensor


class VectorStack(nn.Module):
    """Puts the vectors of all features beside each other, projected to one dim.

    Args:
        dim: D.
    """

    def __init__(self, tables: Sequence[Table], dim: int, *, device: torch.device) -> None:
        super().__init__()
        self.dim = dim
        dims = dict.fromkeys(table.embedding_dim for table in tables)
        ordered = tables_by_feature(t for dim in dims for t in tables if t.embedding_dim == dim)
        self._place = {name: place for place, name in enumerate(ordered)}
        self._orders: dict[Any, _Order] = {}
        self.projections = nn.ModuleDict(
            {
                str(table_dim): nn.Linear(table_dim, dim, bias=False, device=device)
                for table_dim in dims
                if table_dim != dim
            }
        )

    def forward(self, embedded: Tensor, pooled: KeyedTensor) -> Tensor:
        """Return the vectors of `stacked` for pooled vectors of all features."""
        return self.stacked(embedded, pooled.keys(), pooled.length_per_key(), pooled.values())

    def stacked(
        self, embedded: Tensor, features: Sequence[str], dims: Sequence[int], pooled: Tensor
    ) -> Tensor:
        """Return [B, 1 + F, D]: the dense vector, then features by dim, in the model's order.

        Args:
            embedded: [B, D]; the result has its dtype.
            features: all features in any order, which depends on the plan.
            dims: their dims.
            pooled: [B, sum of the dims], their vectors.
        """
        key = tuple(features), tuple(dims)
        if key not in self._orders:  # plans do not change within a training
            self._orders[key] = _order(*key, self._place)
        widths, pieces_of_dims = self._orders[key]
        pieces = pooled.to(embedded.dtype).split(widths, dim=1)
        vectors = [embedded]
        for dim, numbers in pieces_of_dims:
            of_dim = [pieces[number] for number in numbers]
            if dim != self.dim:
                narrow_or_wide = torch.cat(of_dim, dim=1).unflatten(1, (-1, dim))
                of_dim = [self.projections[str(dim)](narrow_or_wide).flatten(1)]
            vectors += of_dim
        return torch.cat(vectors, dim=1).unflatten(1, (-1, self.dim))


@dataclass(slots=True)
class _Run:
    """Features of one dim that are adjacent both in pooled vectors and in the model's order.

    Args:
        place: place of the first feature in the model's order.
    """

    place: int
    dim: int
    num_features: int = 1

    @property
    def width(self) -> int:
        return self.num_features * self.dim


_Order = tuple[list[int], list[tuple[int, list[int]]]]
"""Widths of pieces of pooled vectors; by dim, numbers of the pieces in the model's order."""


def _order(names: Sequence[str], dims: Sequence[int], place: Mapping[str, int]) -> _Order:
    runs = _adjacent_features(names, dims, place)
    in_order = sorted(range(len(runs)), key=lambda number: runs[number].place)
    by_dim = itertools.groupby(in_order, key=lambda number: runs[number].dim)
    return [run.width for run in runs], [(dim, list(numbers)) for dim, numbers in by_dim]


def _adjacent_features(
    names: Sequence[str], dims: Sequence[int], place: Mapping[str, int]
) -> list[_Run]:
    """Divide features into runs that need not be taken apart to reorder them."""
    runs: list[_Run] = []
    for name, dim in zip(names, dims, strict=True):
        last = runs[-1] if runs else None
        if last and last.dim == dim and last.place + last.num_features == place[name]:
            last.num_features += 1
        else:
            runs.append(_Run(place[name], dim))
    return runs
