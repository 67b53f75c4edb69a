"""Prices the sharding options of TorchRec's planner by a calibrated cost model.

TorchRec adds up the prices of a rank's shards, and a plan costs the largest sum. Of a rank's cost,
the work and the bytes of its own shards are such prices. Launches, latencies and bytes of other
ranks' column shards are left out: all plans without row blocks pay the same for them.

Letters: S shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import Perf, Shard, ShardEstimator, ShardingOption
from torchrec.distributed.types import ShardingType

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.communication import STEP_EXCHANGES
from dlrm_sharded.cost.compute import READ_MB
from dlrm_sharded.cost.exchange_prices import ExchangePrices
from dlrm_sharded.cost.workload import Floats, Workload, pooling_of, workload_of_rows
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.plan_cost import BWD_COMM, FWD_COMM
from dlrm_sharded.plans.tables import Table

COLUMN_TYPES = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
)
"""Sharding types whose shards have all rows."""

NEVER = Perf(fwd_compute=np.inf, fwd_comms=0.0, bwd_compute=0.0, bwd_comms=0.0)
"""Price of a shard that the cost model cannot price; TorchRec's planner takes no such option."""


@dataclass(frozen=True, slots=True)
class _PricedShard:
    """A shard to be priced.

    Args:
        group_size: number of ranks that hold the row blocks of the table; 1 for a column shard.
    """

    shard: Shard
    table: Table
    group_size: int


class CalibratedPerfEstimator(ShardEstimator):
    """Estimates the times of shards for TorchRec's `EmbeddingShardingPlanner`, in ms.

    It prices table-wise, column-wise, table-column-wise, row-wise and table-row-wise options with
    the fused kernel. All others get an infinite price, so that no plan has them.

    Args:
        priced: a task under a cost model such as `cost.learned.learned_cost_model` loads. Its
            tables are found by the names that they have in the model.
    """

    def __init__(self, priced: PricedTask) -> None:
        self._task = task = priced.task
        self._tables = {table.name: table for table in task.tables}
        self._compute = priced.compute
        self._exchanges = {
            kind: ExchangePrices.from_model(priced.communication, priced.hosts, kinds=[kind])
            for kind in STEP_EXCHANGES
        }
        whole = self._workload(
            (table, table.num_embeddings, table.embedding_dim, 1) for table in task.tables
        )
        read_mb = self._compute.vectors(whole)[:, READ_MB]
        self._mean_read_mb = float(read_mb.sum()) / task.topology.world_size

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
        """Set `perf` of every shard of the options.

        Raises:
            ConfigError: an option's table is not in the task, or has another shape there.
        """
        priced = []
        for option in sharding_options:
            table, group_size = self._table(option), self._group_size(option)
            for shard in option.shards:
                shard.perf = NEVER
                if group_size is not None:
                    priced.append(_PricedShard(shard, table, group_size))
        if priced:
            self._price(priced)

    def _table(self, option: ShardingOption) -> Table:
        table = self._tables.get(option.name)
        shape = tuple(option.tensor.shape)
        if table is None:
            raise ConfigError(
                f"the task of CalibratedPerfEstimator has no table {option.name!r}; name its "
                "tables as the model does"
            )
        if shape != (table.num_embeddings, table.embedding_dim):
            raise ConfigError(
                f"table {option.name!r} is {shape} in the model and "
                f"{(table.num_embeddings, table.embedding_dim)} in the task of "
                "CalibratedPerfEstimator; rows and columns must be the same"
            )
        return table

    def _group_size(self, option: ShardingOption) -> int | None:
        """Return the number of ranks that share a table's rows; None if there is no price."""
        topology = self._task.topology
        if option.compute_kernel != EmbeddingComputeKernel.FUSED.value:
            return None
        if option.sharding_type in COLUMN_TYPES:
            return 1
        return {
            ShardingType.ROW_WISE.value: topology.world_size,
            ShardingType.TABLE_ROW_WISE.value: topology.ranks_per_host,
        }.get(option.sharding_type)

    def _price(self, priced: list[_PricedShard]) -> None:
        workload = self._workload(
            (entry.table, *entry.shard.size, entry.group_size) for entry in priced
        )
        vectors = self._compute.vectors(workload)
        # Prices rise with what the whole rank reads: at least the shard, about as much as others.
        crowd = vectors.copy()
        crowd[:, READ_MB] = np.maximum(crowd[:, READ_MB], self._mean_read_mb)
        # TorchRec's last blocks of rows may be empty; nothing is looked up there.
        is_there = np.array([min(entry.shard.size) > 0 for entry in priced])
        forward, backward = self._compute.work_ms(vectors, crowd).T * is_there
        comms = {kind: self._comms_ms(kind, workload) * is_there for kind in STEP_EXCHANGES}
        times = zip(forward, comms[FWD_COMM], backward, comms[BWD_COMM], strict=True)
        for entry, (fwd_compute, fwd_comms, bwd_compute, bwd_comms) in zip(
            priced, times, strict=True
        ):
            entry.shard.perf = Perf(
                fwd_compute=float(fwd_compute),
                fwd_comms=float(fwd_comms),
                bwd_compute=float(bwd_compute),
                bwd_comms=float(bwd_comms),
            )

    def _comms_ms(self, kind: str, workload: Workload) -> Floats:
        """Return [S], time that each shard adds to the exchanges of its rank."""
        prices, size = self._exchanges[kind], workload.world_size
        volume = workload.vector_bytes(prices.sequences)
        group_size = workload.reduce_size
        # The rank that decides the cost is taken for the one with the most bytes.
        byte_ms = (
            prices.own_byte_ms
            + prices.any_byte_ms
            + prices.busiest_rank_byte_ms
            + prices.busiest_host_byte_ms
        )
        times: Floats = byte_ms * volume / group_size + prices.shard_ms
        times *= (group_size < size) | (size == 1)
        for ranks, reduce in prices.reduces.items():
            reduce_ms = reduce.byte_ms * volume * (size // ranks) + reduce.shard_ms
            times += (group_size == ranks) * reduce_ms
        return times

    def _workload(self, shards: Iterable[tuple[Table, int, int, int]]) -> Workload:
        """Return the workload of shards given as table, rows, columns and group size."""
        rows, histograms, tables = [], [], []
        for table, num_rows, num_cols, group_size in shards:
            tables.append(table)
            # Empty blocks are priced as if they had a row and a column.
            share = max(num_rows, 1) / table.num_embeddings
            num_ids = self._task.batch_size * table.pooling_factor * share
            rows.append((0, group_size, max(num_rows, 1), max(num_cols, 1), num_ids))
            histograms.append(table.reuse_histogram or ())
        topology = self._task.topology
        workload = workload_of_rows(
            topology.world_size, topology.ranks_per_host, self._task.batch_size, rows, histograms
        )
        return dataclasses.replace(workload, **pooling_of(tables))
