"""Sharding tasks as the tensors that policies see.

Letters: E episodes, one task each; T tables, W ranks, F features of a table, M terms of its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlrm_sharded.cost.features import LINE_COLUMNS, PROFILE, Workload
from dlrm_sharded.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.task import ShardingTask

TABLE_FEATURES = (
    "log_rows",
    "log_columns",
    "log_pooling_factor",
    "log_reuse",
    "log_bytes_read",
    *(f"reuse_bin_{i}" for i in range(NUM_REUSE_BINS)),
)
WORK_TERMS = ("ids", "id_columns", "pooled_columns", "unique_lines")
"""What a table's costs grow with, in a step: ids, columns looked up and columns pooled, cache lines
of the rows that are read."""

LEAST_POOLING_FACTOR = 0.01


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tasks of equally many tables on equally many ranks.

    Args:
        features: [E, T, F], see `TABLE_FEATURES`.
        work: [E, T, M], see `WORK_TERMS`.
        size_bytes: [E, T].
        capacity: [E, W], bytes.
    """

    features: Tensor
    work: Tensor
    size_bytes: Tensor
    capacity: Tensor

    @classmethod
    def of(cls, tasks: Sequence[ShardingTask]) -> Inputs:
        """Of tasks whose tables all have a reuse histogram."""
        described = [describe(task.tables, task.batch_size) for task in tasks]
        return cls(
            features=torch.stack([features for features, _ in described]),
            work=torch.stack([work for _, work in described]),
            size_bytes=torch.tensor(
                [[task.topology.table_bytes(table) for table in task.tables] for task in tasks]
            ),
            capacity=torch.tensor([task.topology.rank_memory_bytes for task in tasks]),
        )

    @property
    def num_episodes(self) -> int:
        return self.work.shape[0]

    @property
    def num_tables(self) -> int:
        return self.work.shape[1]

    @property
    def world_size(self) -> int:
        return self.capacity.shape[1]

    def repeated(self, times: int) -> Inputs:
        """Every task so many times in a row."""
        return Inputs(
            *(
                tensor.repeat_interleave(times, dim=0)
                for tensor in (self.features, self.work, self.size_bytes, self.capacity)
            )
        )

    def chosen(self, episodes: Tensor) -> Inputs:
        """Those of the episodes [N]."""
        return Inputs(
            *(
                tensor[episodes]
                for tensor in (self.features, self.work, self.size_bytes, self.capacity)
            )
        )

    @classmethod
    def joined(cls, parts: Sequence[Inputs]) -> Inputs:
        """The episodes of all parts."""
        return cls(
            features=torch.cat([part.features for part in parts]),
            work=torch.cat([part.work for part in parts]),
            size_bytes=torch.cat([part.size_bytes for part in parts]),
            capacity=torch.cat([part.capacity for part in parts]),
        )

    def in_order(self, order: Tensor) -> Inputs:
        """The tables of each task in the order [E, T]."""
        return Inputs(
            features=self.features.gather(1, order[..., None].expand_as(self.features)),
            work=self.work.gather(1, order[..., None].expand_as(self.work)),
            size_bytes=self.size_bytes.gather(1, order),
            capacity=self.capacity,
        )


def describe(tables: Sequence[Table], batch_size: int) -> tuple[Tensor, Tensor]:
    """Features [T, F] and work [T, M] of whole tables."""
    table = np.arange(len(tables))
    num_cols = np.array([t.embedding_dim for t in tables], dtype=np.float64)
    pooling_factor = np.array([t.pooling_factor for t in tables])
    workload = Workload(
        world_size=1,
        ranks_per_host=1,
        batch_size=batch_size,
        rank=np.zeros_like(table),
        group_size=np.ones_like(table),
        num_rows=np.array([t.num_embeddings for t in tables], dtype=np.float64),
        num_cols=num_cols,
        num_ids=batch_size * pooling_factor,
        reuse_histogram=np.array([t.reuse_histogram or (0.0,) * NUM_REUSE_BINS for t in tables]),
    )
    features = np.column_stack(
        [
            np.log10(workload.num_rows),
            np.log10(num_cols),
            np.log10(np.maximum(pooling_factor, LEAST_POOLING_FACTOR)),
            workload.profile()[:, PROFILE.index("log_reuse")],
            np.log10(np.maximum(workload.unique_bytes(), 1.0)),
            workload.reuse_histogram,
        ]
    )
    work = np.column_stack(
        [
            workload.num_ids,
            workload.num_ids * num_cols,
            batch_size * num_cols,
            workload.num_unique * np.ceil(num_cols / LINE_COLUMNS),
        ]
    )
    return torch.tensor(features, dtype=torch.float32), torch.tensor(work, dtype=torch.float32)
