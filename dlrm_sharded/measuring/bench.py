"""A bench that shards sets of tables on the ranks of this job and measures one after the other."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.measuring.measure import (
    MeasureConfig,
    MeasuredCost,
    MeasuredModule,
    measure_modules,
)
from dlrm_sharded.model.fused_optimizers import fuse
from dlrm_sharded.model.replicas import ShardedTables, replica_optimizer, replicas_of
from dlrm_sharded.model.torchrec_adapter import (
    bag_configs,
    in_aligned_order,
    module_name,
    sequence_configs,
    sharding_env,
)
from dlrm_sharded.plans.table_optimizers import memory_of
from dlrm_sharded.plans.tables import Table, tables_by_feature

ARENA_SLACK = 1.25
"""Memory of the arena relative to weights and element-wise state. Row-wise Adagrad adds one
number per row, which is a quarter of the narrowest table."""

ARENA_ALIGNMENT = 16
"""fp32 numbers in a cache line, at which tensors start as they do with torch's allocator."""

LEARNING_RATE = 0.01


class Bench:
    """Shards tables, measures them and discards them.

    Args:
        optimizer: one of `EMBEDDING_OPTIMIZERS`, fused into the backward pass.
        table_bytes: memory reserved for weights on a CPU; 0 on a rank that holds no tables.
    """

    def __init__(
        self, config: MeasureConfig, device: torch.device, *, optimizer: str, table_bytes: int
    ) -> None:
        self._config = config
        self._device = device
        self._optimizer = optimizer
        self._arena: Tensor | None = None
        if device.type == "cpu" and table_bytes:
            # Filling it faults its pages in, so that lookups do not have to.
            per_weight = ARENA_SLACK * memory_of(optimizer)[0] / 4
            self._arena = torch.full((int(per_weight * table_bytes) // 4,), 0.01)

    def measure(
        self,
        tables: Sequence[Table],
        plan: EmbeddingModuleShardingPlan,
        batches: Sequence[KeyedJaggedTensor],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> MeasuredCost:
        """Measure the tables under a plan; all ranks of the group call it together.

        Bags, sequences, and the tables of different modules of the model are separate modules.

        Args:
            batches: ids of this rank in the order of the tables' features, used in turn.
            group: ranks that the plan is for; None for all ranks of the job.
        """
        modules = self.shard(tables, plan, batches, group=group)
        measured = measure_modules(modules, self._config, group=group)
        if self._device.type == "cuda" or any(replicas_of(module.embeddings) for module in modules):
            # Sharded modules are in reference cycles. They own their replicas on any device, and
            # all of their tables on CUDA.
            del modules
            gc.collect()
        return measured

    def shard(
        self,
        tables: Sequence[Table],
        plan: EmbeddingModuleShardingPlan,
        batches: Sequence[KeyedJaggedTensor],
        *,
        group: dist.ProcessGroup | None = None,
    ) -> list[MeasuredModule]:
        """Shard the tables by a plan; on a CPU, in the memory of the tables sharded before.

        Args:
            batches, group: see `measure`.
        """
        places = {feature: place for place, feature in enumerate(tables_by_feature(tables))}
        in_order = list(places.values())
        with _TablesInArena(self._arena):
            sharded = [
                (
                    self._sharded(of_module, plan, group),
                    [places[feature] for feature in tables_by_feature(of_module)],
                )
                for of_module in modules_of(tables)
            ]
        return [
            MeasuredModule(
                embeddings,
                [
                    (batch if own == in_order else batch.permute(own)).to(self._device)
                    for batch in batches
                ],
                replica_optimizer(embeddings, self._optimizer, LEARNING_RATE),
            )
            for embeddings, own in sharded
        ]

    def _sharded(
        self,
        tables: Sequence[Table],
        plan: EmbeddingModuleShardingPlan,
        group: dist.ProcessGroup | None,
    ) -> ShardedTables:
        """Shard the tables of one module by their part of a plan."""
        names = [module_name(table.name) for table in tables]
        part = EmbeddingModuleShardingPlan({name: plan[name] for name in names})
        env, meta = sharding_env(group), torch.device("meta")
        if tables[0].pooled:
            bags = EmbeddingBagCollection(tables=bag_configs(tables), device=meta)
            fuse(self._optimizer, bags.parameters(), LEARNING_RATE)
            return EmbeddingBagCollectionSharder().shard(bags, part, env, self._device)
        sequences = EmbeddingCollection(tables=sequence_configs(tables), device=meta)
        fuse(self._optimizer, sequences.parameters(), LEARNING_RATE)
        return EmbeddingCollectionSharder().shard(sequences, part, env, self._device)


def modules_of(tables: Sequence[Table]) -> list[list[Table]]:
    """Divide tables among TorchRec's modules, each in the order in which the trainer has them.

    A module of sequences has tables of one width only.
    """
    modules: dict[Any, list[Table]] = {}
    for table in tables:
        width = 0 if table.pooled else table.embedding_dim
        modules.setdefault((table.module, table.pooled, width), []).append(table)
    return [in_aligned_order(of_module) for of_module in modules.values()]


class _TablesInArena(TorchFunctionMode):
    """Creates tables without filling them; on a CPU, successive sets share the arena's memory.

    Otherwise TorchRec would write every table twice, with zeros and with uniform numbers, which
    takes longer than the measurement.
    """

    def __init__(self, arena: Tensor | None) -> None:
        super().__init__()
        self._arena = arena
        self._used = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.uniform_, torch.nn.init.uniform_):
            return kwargs.get("tensor", args[0] if args else None)
        is_flat = func is torch.zeros and len(args) == 1 and isinstance(args[0], int)
        if is_flat and self._arena is not None and kwargs.get("dtype") is torch.float32:
            start, stop = self._used, self._used + args[0]
            if stop <= len(self._arena):
                self._used = -(-stop // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
                return self._arena[start:stop]
        return func(*args, **kwargs)
