"""Presents a sharded model's weights and optimizer state as tensors of whole tables.

TorchRec's own state dict of a row-wise optimizer has one entry for each row and each column shard,
in the order of the plan, so it does not load under another plan. Here, state with one number per
row of a shard is a logical tensor [R, C] with known column bounds.

Letters: R rows of a table, D its columns, C its column shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.model.fused_lookups import fused_lookups
from dlrm_sharded.model.replicas import replica_states, replicas_of
from dlrm_sharded.model.sharded_model import EMBEDDINGS, sharded_embeddings
from dlrm_sharded.model.torchrec_adapter import table_name
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.table_optimizers import STATE_BYTES
from dlrm_sharded.plans.tables import Table

ColumnBounds = Mapping[str, tuple[int, ...]]
"""By table, the columns at which its column shards begin, and its number of columns."""


TABLE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
"""Types of tables' weights in memory and in checkpoints, by precision."""


@dataclass(frozen=True, slots=True)
class ModelState:
    """The logical tensors of a model. Their pieces are views of the memory that training updates.

    Args:
        weights: tables, dense weights and buffers.
        dense_optimizer: state of the dense optimizer.
        fused_optimizer: element-wise state of the tables' optimizer, [R, D] each.
        row_states: state of the tables' optimizer with one number per row of a shard, [R, C] each.
        column_bounds: column bounds of all tables.
        buffers: names of the dense weights that are buffers.
    """

    weights: dict[str, LogicalTensor]
    dense_optimizer: dict[str, LogicalTensor]
    fused_optimizer: dict[str, LogicalTensor]
    row_states: dict[str, LogicalTensor]
    column_bounds: ColumnBounds
    buffers: tuple[str, ...] = ()

    @property
    def tensors(self) -> dict[str, LogicalTensor]:
        """All logical tensors by name."""
        return self.weights | self.dense_optimizer | self.fused_optimizer | self.row_states


def model_state(
    model: nn.Module,
    optimizer: CombinedOptimizer,
    plan: ShardingPlan,
    tables: Sequence[Table],
    *,
    embedding_optimizer: str,
) -> ModelState:
    """Return the state of a sharded model.

    Args:
        embedding_optimizer: one of `EMBEDDING_OPTIMIZERS`.
    """
    bounds = column_bounds(plan)
    element_states, row_states = (size // 4 for size in STATE_BYTES[embedding_optimizer])
    pieces: dict[str, list[Piece]] = {}
    for table, offsets, weight, states in (*_shards(model), *_replicas(model, optimizer)):
        pieces.setdefault(table_key(table), []).append(Piece(offsets, weight))
        for number, state in enumerate(states, start=1):
            piece = Piece(offsets, state)
            if state.dim() == 1:
                column = bounds[table].index(offsets[1])
                piece = Piece((offsets[0], column), state.unsqueeze(1))
            pieces.setdefault(state_key(table, number), []).append(piece)

    def logical(
        key: str, num_rows: int, num_cols: int, dtype: torch.dtype = torch.float32
    ) -> LogicalTensor:
        return LogicalTensor((num_rows, num_cols), dtype, tuple(pieces.get(key, ())))

    weights, fused, by_row = {}, {}, {}
    for config in tables:
        rows, dim, name = config.num_embeddings, config.embedding_dim, config.name
        dtype = TABLE_DTYPES[config.precision]
        weights[table_key(name)] = logical(table_key(name), rows, dim, dtype)
        for number in range(1, element_states + row_states + 1):
            key = state_key(name, number)
            if number <= element_states:
                fused[key] = logical(key, rows, dim)
            else:
                by_row[key] = logical(key, rows, len(bounds[name]) - 1)
    dense = _dense_weights(model)
    buffers = tuple(key for name, _ in model.named_buffers() if (key := dense_key(name)) in dense)
    return ModelState(weights | dense, _dense_optimizer(optimizer), fused, by_row, bounds, buffers)


def table_key(table: str) -> str:
    """Return the name of a table's weights."""
    return f"tables.{table}.weight"


def state_key(table: str, number: int) -> str:
    """Return the name of a table's optimizer state with this number, which FBGEMM counts from 1."""
    return f"tables.{table}.momentum{number}"


def dense_key(name: str) -> str:
    """Return the name of a dense weight or buffer."""
    return f"dense.{name}"


def column_bounds(plan: ShardingPlan) -> ColumnBounds:
    """Return the column bounds of all tables of a plan."""
    return {
        table: tuple(sorted({column for shard in shards for column in shard.cols}))
        for table, shards in plan.shards_by_table().items()
    }


class _Shard(NamedTuple):
    """A shard or replica of a table on this rank, in the memory of its lookup.

    Args:
        offsets: row and column at which it begins.
        weight: [rows, cols].
        states: optimizer state, each [rows, cols] or [rows].
    """

    table: str
    offsets: tuple[int, int]
    weight: Tensor
    states: tuple[Tensor, ...]


def _shards(model: nn.Module) -> Iterator[_Shard]:
    """Yield this rank's shards that are in fused lookups."""
    for kernel in fused_lookups(model):
        weights = kernel.emb_module.split_embedding_weights()
        states = kernel.emb_module.split_optimizer_states() or [()] * len(weights)
        for config, weight, of_table in zip(
            kernel.config.embedding_tables, weights, states, strict=True
        ):
            row, col = config.local_metadata.shard_offsets
            yield _Shard(table_name(config.name), (row, col), weight.detach(), tuple(of_table))


def _replicas(model: nn.Module, optimizer: CombinedOptimizer) -> Iterator[_Shard]:
    """Yield the replicas, which are the same on all ranks."""
    for replicas in replicas_of(sharded_embeddings(model)):
        states = replica_states(optimizer, replicas)
        for table, weight in replicas.by_table(replicas.weights.detach()):
            yield _Shard(table, (0, 0), weight, states[table])


def _dense_weights(model: nn.Module) -> dict[str, LogicalTensor]:
    in_tables = sharded_embeddings(model).embedding_bags
    names = {f"{EMBEDDINGS}.embedding_bags.{table}.weight" for table in in_tables}
    return {
        dense_key(name): LogicalTensor.whole(tensor.detach())
        for name, tensor in model.state_dict().items()
        if name not in names
    }


def _dense_optimizer(optimizer: CombinedOptimizer) -> dict[str, LogicalTensor]:
    """Return the state of the dense optimizer, which some optimizers create in their first step."""
    (dense,) = (o for name, o in optimizer.optimizers if name == "dense")
    assert isinstance(dense, KeyedOptimizer)
    if not dense.state:
        dense.init_state()  # a step with zero gradients
        dense.zero_grad(set_to_none=True)
    return {
        f"optimizer.{parameter}.{name}": LogicalTensor.whole(value)
        for parameter, state in dense.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
