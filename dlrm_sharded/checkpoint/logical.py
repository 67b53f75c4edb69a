"""Logical tensors, and the pieces of them that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PART_BYTES = 2**26
"""Largest size of a part, unless one row is larger. Parts on a GPU are copied before writing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a logical tensor.

    Args:
        offsets: place of the rectangle's first element, one number for each axis.
        tensor: the rectangle, which may be a view of a parameter.
    """

    offsets: tuple[int, ...]
    tensor: Tensor

    def blocks(self, most_bytes: int = PART_BYTES) -> Iterator[Piece]:
        """Yield the piece in blocks of rows, of at most this size but at least one row."""
        if self.tensor.dim() == 0:
            yield self
            return
        rows = self.tensor.shape[0]
        row_bytes = max(1, math.prod(self.tensor.shape[1:]) * self.tensor.element_size())
        height = max(1, most_bytes // row_bytes)
        for start in range(0, rows, height):
            offsets = (self.offsets[0] + start, *self.offsets[1:])
            yield Piece(offsets, self.tensor[start : start + height])


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A whole tensor, and the pieces of it that this rank holds.

    Args:
        shape: shape of the whole tensor.
        pieces: pieces that this rank writes, or reads into. Ranks may hold equal pieces.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> LogicalTensor:
        """Return the logical tensor of a tensor that every rank holds whole."""
        return cls(tuple(tensor.shape), tensor.dtype, (Piece((0,) * tensor.dim(), tensor),))


State = Mapping[str, LogicalTensor]
"""Logical tensors by name."""
