"""The replicas of a sharded model: their weights, and the optimizer that updates them.

TorchRec looks up replicas with its dense kernel, within DistributedDataParallel (DDP). The tables
of a kernel are concatenated in one parameter, whose gradients DDP averages over the ranks. TorchRec
also divides the gradients of all other tables by the number of ranks, so a replica's mean gradient
is the gradient that a fused optimizer would see if the table were on one rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.model.dense_adagrad import DenseAdagrad, has_fused_kernel
from dlrm_sharded.model.fused_optimizers import FUSED_EPSILON
from dlrm_sharded.model.torchrec_adapter import table_name
from dlrm_sharded.plans.table_optimizers import why_not_replicated

ShardedTables: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
"""A sharded module of tables, whose lookups pool bags or look up sequences."""

REPLICAS = "replicas"
"""Name of the replicas' part of a combined optimizer."""


@dataclass(frozen=True, slots=True)
class ReplicaWeights:
    """The replicas that this rank looks up with one kernel.

    Args:
        tables: names of the tables.
        shapes: numbers of rows and columns of each table.
        weights: [sum of rows x columns], the weights of all tables, one after the other.
        place: index of their lookup among the collection's lookups.
        group: ranks that average the gradients.
    """

    tables: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    weights: nn.Parameter
    place: int
    group: dist.ProcessGroup

    def by_table(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Split a flat tensor of all tables into the name and the part of each, [R, D] or [R].

        Args:
            flat: one number for each weight, or for each row.
        """
        is_by_row = flat.numel() != self.weights.numel()
        sizes = [rows if is_by_row else rows * cols for rows, cols in self.shapes]
        for table, shape, part in zip(self.tables, self.shapes, flat.split(sizes), strict=True):
            yield table, part if is_by_row else part.view(shape)


def replicas_of(embeddings: ShardedTables) -> list[ReplicaWeights]:
    """Return the replicas of a sharded collection; none if its plan has none."""
    return [
        ReplicaWeights(
            tables=tuple(table_name(config.name) for config in kernel.config.embedding_tables),
            shapes=tuple((c.local_rows, c.local_cols) for c in kernel.config.embedding_tables),
            weights=kernel.emb_module.weights,
            place=place,
            group=lookup.process_group,
        )
        for place, lookup in replica_lookups(embeddings).items()
        for kernel in lookup.modules()
        if isinstance(kernel, BatchedDenseEmbeddingBag | BatchedDenseEmbedding)
    ]


def replica_lookups(embeddings: ShardedTables) -> dict[int, Any]:
    """Return the lookups that are wrapped in DDP, by index among the collection's lookups."""
    return {
        place: lookup
        for place, lookup in enumerate(embeddings._lookups)
        if isinstance(lookup, DistributedDataParallel)
    }


def replica_optimizer(
    embeddings: ShardedTables, optimizer: str, learning_rate: float
) -> KeyedOptimizer | None:
    """Return the optimizer of all replicas of a collection; None if there are none.

    Args:
        optimizer: the optimizer that is fused into the lookups of the other tables.

    Raises:
        ConfigError: replicas cannot be trained with it.
    """
    replicas = replicas_of(embeddings)
    if not replicas:
        return None
    if reason := why_not_replicated(optimizer):
        raise ConfigError(f"optimizer.embedding is {reason}")

    def make(weights: list[nn.Parameter]) -> Optimizer:
        if optimizer == "sgd":
            return torch.optim.SGD(weights, lr=learning_rate)
        if optimizer == "elementwise_adagrad":
            fused = has_fused_kernel("adagrad", weights[0].device)
            return DenseAdagrad(weights, lr=learning_rate, fused=fused, eps=FUSED_EPSILON)
        assert optimizer == "rowwise_adagrad", f"replicas have no {optimizer}"
        return ReplicaRowwiseAdagrad(replicas, lr=learning_rate)

    return KeyedOptimizerWrapper({"/".join(of.tables): of.weights for of in replicas}, make)


def replica_part(optimizer: CombinedOptimizer) -> KeyedOptimizer | None:
    """Return the part of a model's optimizer that updates replicas; None if it has none."""
    return dict(optimizer.optimizers).get(REPLICAS)


def replica_states(
    optimizer: CombinedOptimizer, of: ReplicaWeights
) -> dict[str, tuple[Tensor, ...]]:
    """Return the optimizer state of each table, [rows] or [rows, cols], in FBGEMM's form.

    The tensors are views of the state that training changes.
    """
    part = replica_part(optimizer)
    assert part is not None, "a model with replicas has an optimizer of them"
    state = part.state.get(of.weights, {})
    if SUMS not in state:
        return dict.fromkeys(of.tables, ())
    return {table: (sums,) for table, sums in of.by_table(state[SUMS])}


SUMS = "sum"
"""Name of Adagrad's state: squared gradients (row-wise: their row means), summed over steps."""


class ReplicaRowwiseAdagrad(Optimizer):
    """Row-wise Adagrad on dense gradients, which equals FBGEMM's fused one.

    FBGEMM updates only the rows that a batch looks up. The gradients of all other rows are zero,
    which changes neither their state nor their weights.
    """

    def __init__(self, replicas: Sequence[ReplicaWeights], *, lr: float) -> None:
        super().__init__([of.weights for of in replicas], {"lr": lr})
        self._blocks: dict[Tensor, list[tuple[int, int]]] = {
            of.weights: _blocks_of_width(of.shapes) for of in replicas
        }
        for of in replicas:
            num_rows = sum(rows for rows, _ in of.shapes)
            self.state[of.weights][SUMS] = torch.zeros(num_rows, device=of.weights.device)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all tables that have gradients; there is no `closure`."""
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._update(weights, group["lr"])

    def _update(self, weights: Tensor, learning_rate: float) -> None:
        blocks = self._blocks[weights]
        flat_sizes = [rows * cols for rows, cols in blocks]
        assert weights.grad is not None
        for block, flat, flat_gradient, state in zip(
            blocks,
            weights.split(flat_sizes),
            weights.grad.split(flat_sizes),
            self.state[weights][SUMS].split([rows for rows, _ in blocks]),
            strict=True,
        ):
            gradient = flat_gradient.view(block)
            # A norm reads the gradient once; the mean of its squares would first write the squares.
            norms = torch.linalg.vector_norm(gradient, dim=1)
            state.addcmul_(norms, norms, value=1 / block[1])
            steps = (state.sqrt() + FUSED_EPSILON).reciprocal_()
            flat.view(block).addcmul_(gradient, steps.unsqueeze(1), value=-learning_rate)


def _blocks_of_width(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge successive tables of one width into one block, which is updated at once."""
    return [
        (sum(rows for rows, _ in tables), cols)
        for cols, tables in itertools.groupby(shapes, key=lambda shape: shape[1])
    ]
