"""Sharding tasks as the tensors that policies read.

Letters: E episodes, one task each; T tables, W ranks, F features of a table, M terms of its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlrm_sharded.cost.features import LINE_COLUMNS, PROFILE, profile_of
from dlrm_sharded.cost.workload import USES_OF_BIN, workload_of_tables
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.rank_costs import RankCosts

FEATURE_NAMES = (
    "log_rows",
    "log_columns",
    "log_pooling_factor",
    "log_reuse",
    "log_bytes_read",
    *(f"accesses_up_to_bin_{i}" for i in range(NUM_REUSE_BINS)),
)
"""The features of a table, in the order of their tensor.

The features of reuse bins are cumulative: the share of the accesses to rows of the bin and of all
bins of less reuse. The papers use shares of rows instead, of which the hottest are hardly any.
"""

WORK_NAMES = ("ids", "id_columns", "pooled_columns", "unique_lines")
"""The amounts of work per step with which a table's cost grows: ids, columns looked up, columns
pooled, and cache lines of the rows that are read."""

MIN_POOLING_FACTOR = 0.01
"""Smaller pooling factors have the feature of this one, so that the logarithm stays finite."""


@dataclass(frozen=True, slots=True)
class TaskTensors:
    """Tasks that all have the same number of tables and the same number of ranks.

    Args:
        features: [E, T, F], see `FEATURE_NAMES`.
        work: [E, T, M], see `WORK_NAMES`.
        size_bytes: [E, T], memory of each table.
        capacity: [E, W], memory of each rank in bytes.
        costs: costs of the hardware to place for; None for the hardware of a policy's training.
    """

    features: Tensor
    work: Tensor
    size_bytes: Tensor
    capacity: Tensor
    costs: RankCosts | None = None

    @classmethod
    def from_tasks(cls, tasks: Sequence[ShardingTask]) -> TaskTensors:
        """Convert tasks whose tables all have a reuse histogram."""
        tensors = [table_tensors(task.tables, task.batch_size) for task in tasks]
        return cls(
            features=torch.stack([features for features, _ in tensors]),
            work=torch.stack([work for _, work in tensors]),
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

    def repeat(self, times: int) -> TaskTensors:
        """Return every task `times` times in a row."""
        return self.select(torch.arange(self.num_episodes).repeat_interleave(times))

    def select(self, episodes: Tensor) -> TaskTensors:
        """Return the tasks of the episodes with indices [N]."""
        return TaskTensors(
            features=self.features[episodes],
            work=self.work[episodes],
            size_bytes=self.size_bytes[episodes],
            capacity=self.capacity[episodes],
            costs=self.costs and self.costs.select(episodes),
        )

    def reorder(self, order: Tensor) -> TaskTensors:
        """Return the tasks with their tables in the order [E, T]."""
        return TaskTensors(
            features=self.features.gather(1, order[..., None].expand_as(self.features)),
            work=self.work.gather(1, order[..., None].expand_as(self.work)),
            size_bytes=self.size_bytes.gather(1, order),
            capacity=self.capacity,
            costs=self.costs and self.costs.reorder(order),
        )


def table_tensors(tables: Sequence[Table], batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the features [T, F] and the work [T, M] of whole tables."""
    workload = workload_of_tables(tables, batch_size)
    num_cols = workload.num_cols
    accesses = workload.reuse_histogram * USES_OF_BIN
    pooling_factor = np.array([t.pooling_factor for t in tables])
    features = np.column_stack(
        [
            np.log10(workload.num_rows),
            np.log10(num_cols),
            np.log10(np.maximum(pooling_factor, MIN_POOLING_FACTOR)),
            profile_of(workload)[:, PROFILE.index("log_reuse")],
            np.log10(np.maximum(workload.unique_bytes(), 1.0)),
            (accesses / np.maximum(accesses.sum(axis=1, keepdims=True), 1e-9)).cumsum(axis=1),
        ]
    )
    work = np.column_stack(
        [
            workload.num_ids,
            workload.num_ids * num_cols,
            workload.num_vectors * num_cols,
            workload.num_unique * np.ceil(num_cols / LINE_COLUMNS),
        ]
    )
    return torch.tensor(features, dtype=torch.float32), torch.tensor(work, dtype=torch.float32)
