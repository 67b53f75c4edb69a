"""Stacks the vectors of a sample's features, whatever the dims of their tables.

TorchRec is not imported here, because an exported model is scored without it.

Letters: B batch, F features, D interaction dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlrm_sharded.plans.tables import Table, tables_by_feature

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedTensor


class VectorStack(nn.Module):
    """Stacks the vectors of all features, projected to one dim.

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
        """Return `stacked` for the pooled vectors of all features."""
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
        if key not in self._orders:  # plans do not change within a run
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


_Order = tuple[list[int], list[tuple[int, list[int]]]]
"""Widths of pieces of the pooled vectors, and by dim the pieces' indices in the model's order."""


def _order(names: Sequence[str], dims: Sequence[int], place: Mapping[str, int]) -> _Order:
    """Return how to reorder features; runs that are adjacent in both orders stay together."""
    places = [place[name] for name in names]
    # within a run, places ascend as numbers do, so their difference is constant
    features = [
        (of - number, dim, of) for number, (of, dim) in enumerate(zip(places, dims, strict=True))
    ]
    runs = [
        (dim, [of for _, _, of in run])
        for (_, dim), run in itertools.groupby(features, key=lambda feature: feature[:2])
    ]
    in_order = sorted(range(len(runs)), key=lambda number: runs[number][1])
    by_dim = itertools.groupby(in_order, key=lambda number: runs[number][0])
    widths = [dim * len(of_run) for dim, of_run in runs]
    return widths, [(dim, list(numbers)) for dim, numbers in by_dim]
