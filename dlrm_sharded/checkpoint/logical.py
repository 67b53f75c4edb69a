"""Logical tensors, and DCP's planner of who writes which piece of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

PART_BYTES = 2**26
"""Largest size of a part, unless one row is larger. Writing a part takes twice its memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a logical tensor.

    Args:
        offsets: place of the rectangle's first element, one number for each axis.
        tensor: the rectangle, which may be a view of a parameter.
    """

    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def index_range(self) -> ChunkStorageMetadata:
        """DCP's description of the rectangle."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.size())

    def blocks(self, most_bytes: int = PART_BYTES) -> Iterator[Piece]:
        """Yield the piece in blocks of rows of at most this size, but of one row at the least."""
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
        """Return a tensor that every rank holds."""
        return cls(tuple(tensor.shape), tensor.dtype, (Piece((0,) * tensor.dim(), tensor),))


State = Mapping[str, LogicalTensor]
"""Logical tensors by name."""


class SavePlanner(DefaultSavePlanner):
    """Lets each rank write the blocks of its pieces; equal ones are written once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.is_coordinator = is_coordinator
        self.state_dict = state_dict
        self._blocks = {
            MetadataIndex(name, block.offsets): block
            for name, logical in state_dict.items()
            for piece in logical.pieces
            for block in piece.blocks()
        }

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([self._item(index, block) for index, block in self._blocks.items()])
        return self.plan

    def _item(self, index: MetadataIndex, block: Piece) -> WriteItem:
        logical = self.state_dict[index.fqn]
        data = TensorWriteData(
            chunk=block.index_range,
            properties=TensorProperties(dtype=logical.dtype),
            size=torch.Size(logical.shape),
        )
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._blocks[index].tensor
