"""Measures the computation of a plan's ranks one after the other, in a single process.

TorchRec shards the tables, and their lookups are timed as in a collection.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.accesses.patterns import AccessPattern, ZipfAccesses
from dlrm_sharded.accesses.profiles import ASSUMED_EXPONENT
from dlrm_sharded.measuring.bench import Bench
from dlrm_sharded.measuring.drawn_table import DrawnTable
from dlrm_sharded.measuring.measure import MeasureConfig, MeasuredCost
from dlrm_sharded.measuring.random_ids import draw_batch
from dlrm_sharded.model.torchrec_adapter import parameter_sharding
from dlrm_sharded.plans.layouts import ColumnShards, Layout, Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.plan_cost import (
    COMPUTE_STAGES,
    EXCHANGE_STAGES,
    NO_COST,
    PlanCost,
    StageCost,
)
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, Topology

TYPICAL_ACCESSES: AccessPattern = ZipfAccesses(ASSUMED_EXPONENT)


@dataclass(frozen=True, slots=True)
class Ids:
    """The ids of one batch for one table: [num_ids], and the number of ids of each sample, [B]."""

    values: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def in_rows(self, start: int, stop: int) -> Ids:
        """Return the ids that reach a block of rows, counted from its first row."""
        inside = (self.values >= start) & (self.values < stop)
        sample = np.repeat(np.arange(len(self.lengths)), self.lengths)
        lengths = np.bincount(sample[inside], minlength=len(self.lengths))
        return Ids(self.values[inside] - start, lengths.astype(np.int32))

    def of_rank(self, rank: int, num_ranks: int) -> Ids:
        """Return the ids of a rank's samples; the other samples have none."""
        size = len(self.lengths) // num_ranks
        before, own = (int(self.lengths[: (rank + i) * size].sum()) for i in (0, 1))
        lengths = np.zeros_like(self.lengths)
        lengths[rank * size : (rank + 1) * size] = self.lengths[rank * size : (rank + 1) * size]
        return Ids(self.values[before:own], lengths)


@dataclass(frozen=True, slots=True)
class TableIds:
    """Tables by name, and batches of ids for each of them.

    Args:
        num_ranks: ranks of the plans that are measured, whose replicas see their own samples.
    """

    tables: Mapping[str, Table]
    batches: tuple[Mapping[str, Ids], ...]
    num_ranks: int

    def shard_ids(self, shard: Shard, batch: int) -> Ids:
        """Return the ids of one batch that reach the shard."""
        ids = self.batches[batch][shard.table]
        if shard.replicated:
            return ids.of_rank(shard.rank, self.num_ranks)
        return ids.in_rows(*shard.rows) if self.is_row_block(shard) else ids

    def is_row_block(self, shard: Shard) -> bool:
        """Return whether the shard lacks rows of its table."""
        return shard.num_rows < self.tables[shard.table].num_embeddings


def draw_ids(
    tables: Sequence[Table],
    *,
    batch_size: int,
    num_batches: int,
    seed: int,
    accesses: Mapping[str, AccessPattern] | None = None,
    num_ranks: int = 1,
) -> TableIds:
    """Draw ids, by default with the skew that fits Meta's dlrm_datasets best.

    Args:
        accesses: patterns of tables with other accesses, by name.
    """
    patterns = {table.name: TYPICAL_ACCESSES for table in tables} | dict(accesses or {})
    drawn = [
        DrawnTable(t.num_embeddings, t.embedding_dim, t.pooling_factor, patterns[t.name], rank=0)
        for t in tables
    ]
    batches = []
    for rng in np.random.default_rng(seed).spawn(num_batches):
        jagged = draw_batch(drawn, batch_size, rng, batch_size=batch_size).to_dict().values()
        batches.append(
            {
                table.name: Ids(ids.values().numpy(), ids.lengths().numpy())
                for table, ids in zip(tables, jagged, strict=True)
            }
        )
    return TableIds({table.name: table for table in tables}, tuple(batches), num_ranks)


class RankBench:
    """Measures the shards of one rank of a plan, in a job of a single rank.

    Args:
        optimizer, table_bytes: see `Bench`.
    """

    def __init__(
        self, config: MeasureConfig, device: torch.device, *, optimizer: str, table_bytes: int
    ) -> None:
        assert dist.get_world_size() == 1, "a job of several ranks would share the cores"
        self._bench = Bench(config, device, optimizer=optimizer, table_bytes=table_bytes)
        self._topology = Topology(1, memory_bytes=GIB, compute_device=device.type)

    def measure(self, shards: Sequence[Shard], ids: TableIds) -> StageCost:
        """Measure the computation of shards that share a rank; exchanges count as 0 ms."""
        measured = self.measure_all(shards, ids).cost
        return measured.with_stages({stage: [0.0] for stage in EXCHANGE_STAGES}).per_rank[0]

    def measure_rounds(
        self,
        ranks: Sequence[Sequence[Shard]],
        ids: TableIds,
        *,
        rounds: int = 1,
        rng: np.random.Generator | None = None,
    ) -> list[list[StageCost]]:
        """Measure the shards of every rank once in each round, and return the rounds by rank.

        Args:
            ranks: shards of each rank, of one plan or of several.
            rng: draws a new order for every round; by default, ranks keep their order.
        """
        measured: list[list[StageCost]] = [[] for _ in ranks]
        for _ in range(rounds):
            for i in range(len(ranks)) if rng is None else rng.permutation(len(ranks)):
                measured[i].append(self.measure(ranks[i], ids) if ranks[i] else NO_COST)
        return measured

    def measure_all(self, shards: Sequence[Shard], ids: TableIds) -> MeasuredCost:
        """Measure shards that share a rank, with their launch times and spread.

        Each shard becomes a table with the ids that reach it. A block of rows keeps the row-wise
        lookup that it has in a job of several ranks. The rank exchanges only with itself.
        """
        pieces = [
            dataclasses.replace(
                ids.tables[shard.table],
                name=f"t{i}",
                num_embeddings=shard.num_rows,
                embedding_dim=shard.num_cols,
                features=(),
            )
            for i, shard in enumerate(shards)
        ]
        plan = EmbeddingModuleShardingPlan(
            {
                piece.name: parameter_sharding(
                    [Shard.whole(piece, rank=0)], _layout_alone(shard, ids), self._topology
                )
                for piece, shard in zip(pieces, shards, strict=True)
            }
        )
        batches = [
            _jagged([ids.shard_ids(shard, batch) for shard in shards])
            for batch in range(len(ids.batches))
        ]
        return self._bench.measure(pieces, plan, batches)


def with_measured(predicted: PlanCost, rounds: Sequence[Sequence[StageCost]]) -> PlanCost:
    """Return a predicted cost with measured computation, the median of each rank's rounds."""

    def medians_ms(stage: str) -> list[float]:
        return [statistics.median(cost.stage_ms(stage) for cost in costs) for costs in rounds]

    return predicted.with_stages({stage: medians_ms(stage) for stage in COMPUTE_STAGES})


def _layout_alone(shard: Shard, ids: TableIds) -> Layout:
    """Return the layout in a job of one rank that has the kernel of the shard's own layout."""
    if shard.replicated:
        return Replicas(1)
    return RowBlocks(range(1)) if ids.is_row_block(shard) else ColumnShards()


def _jagged(ids: Sequence[Ids]) -> KeyedJaggedTensor:
    """Join the ids of tables t0, t1, ..."""
    return KeyedJaggedTensor(
        keys=[f"t{i}" for i in range(len(ids))],
        values=torch.from_numpy(np.concatenate([table_ids.values for table_ids in ids])),
        lengths=torch.from_numpy(np.concatenate([table_ids.lengths for table_ids in ids])),
        length_per_key=[table_ids.values.size for table_ids in ids],
    )
