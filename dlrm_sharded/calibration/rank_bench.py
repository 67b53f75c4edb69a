"""What shards cost on a rank of their own: one process measures the ranks of a plan one by one.

Sharded by TorchRec, looked up and timed as `collect` does it, but without other ranks: computation
only, as nothing is exchanged; a cost model says what the exchanges would take.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.calibration.collect import Uninitialized, ids_of_drawn
from dlrm_sharded.calibration.measure import MeasureConfig, measure
from dlrm_sharded.calibration.random_plans import DrawnTable
from dlrm_sharded.cost.base import CostModel
from dlrm_sharded.fused_optimizers import fuse
from dlrm_sharded.layouts import ColumnShards, RowBlocks
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.plan_cost import PlanCost, StageCost
from dlrm_sharded.profiles import ASSUMED_EXPONENT
from dlrm_sharded.tables import Table
from dlrm_sharded.task import GIB, ShardingTask, Topology
from dlrm_sharded.torchrec_adapter import bag_configs, parameter_sharding

OPTIMIZER_SLACK = 1.25
"""Row-wise Adagrad keeps one number per row: a quarter of the narrowest table."""


@dataclass(frozen=True, slots=True)
class Ids:
    """One batch's ids of one table: those of all samples in a row, and how many each sample has."""

    values: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def in_rows(self, start: int, stop: int) -> Ids:
        """Those that a block of rows serves, counted from its first row."""
        inside = (self.values >= start) & (self.values < stop)
        sample = np.repeat(np.arange(len(self.lengths)), self.lengths)
        lengths = np.bincount(sample[inside], minlength=len(self.lengths))
        return Ids(self.values[inside] - start, lengths.astype(np.int32))


@dataclass(frozen=True, slots=True)
class TableIds:
    """Tables, and batches of ids for each of them, by name."""

    tables: dict[str, Table]
    batches: tuple[dict[str, Ids], ...]

    def of_shard(self, shard: Shard, batch: int) -> Ids:
        """Those of one batch that reach the shard."""
        ids = self.batches[batch][shard.table]
        return ids.in_rows(*shard.rows) if self.is_row_block(shard) else ids

    def is_row_block(self, shard: Shard) -> bool:
        """Whether the shard has some rows of its table only."""
        return shard.num_rows < self.tables[shard.table].num_embeddings


def draw_ids(tables: Sequence[Table], *, batch_size: int, num_batches: int, seed: int) -> TableIds:
    """Ids of the access skew that cost models assume for tables without a profile."""
    drawn = [
        DrawnTable(t.num_embeddings, t.embedding_dim, t.pooling_factor, ASSUMED_EXPONENT, rank=0)
        for t in tables
    ]
    batches = []
    for rng in np.random.default_rng(seed).spawn(num_batches):
        of_tables = ids_of_drawn(drawn, batch_size, rng).to_dict().values()
        batches.append(
            {
                table.name: Ids(ids.values().numpy(), ids.lengths().numpy())
                for table, ids in zip(tables, of_tables, strict=True)
            }
        )
    return TableIds({table.name: table for table in tables}, tuple(batches))


class Bench:
    """Measures shards on the one rank of this job.

    Args:
        table_bytes: memory that is reserved for the shards' weights, on a CPU.
    """

    def __init__(
        self, config: MeasureConfig, device: torch.device, *, table_bytes: int, optimizer: str
    ) -> None:
        assert dist.get_world_size() == 1, "a bench is one rank alone"
        self._config = config
        self._device = device
        self._optimizer = optimizer
        self._env = ShardingEnv.from_process_group(dist.group.WORLD)
        self._arena: torch.Tensor | None = None
        if device.type == "cpu":
            # written once, so that its pages are there: lookups must not fault them in
            self._arena = torch.full((int(OPTIMIZER_SLACK * table_bytes) // 4,), 0.01)

    def measure(self, shards: Sequence[Shard], ids: TableIds) -> StageCost:
        """Computation of the shards together, as one rank of a plan has it; no communication.

        Each shard is a table of its own with the ids that reach it. A block of rows gets the
        row-wise lookup that it has among other ranks.
        """
        pieces = [
            dataclasses.replace(
                ids.tables[shard.table],
                name=f"t{i}",
                num_embeddings=shard.num_rows,
                embedding_dim=shard.num_cols,
            )
            for i, shard in enumerate(shards)
        ]
        unsharded = EmbeddingBagCollection(tables=bag_configs(pieces), device=torch.device("meta"))
        fuse(self._optimizer, unsharded.parameters(), learning_rate=0.01)
        topology = Topology(1, memory_bytes=GIB, compute_device=self._device.type)
        plan = EmbeddingModuleShardingPlan(
            {
                piece.name: parameter_sharding(
                    [Shard.whole(piece, rank=0)],
                    RowBlocks(range(1)) if ids.is_row_block(shard) else ColumnShards(),
                    topology,
                )
                for piece, shard in zip(pieces, shards, strict=True)
            }
        )
        with Uninitialized(self._arena):
            embeddings = EmbeddingBagCollectionSharder().shard(
                unsharded, plan, self._env, self._device
            )
        batches = [
            _jagged([ids.of_shard(shard, batch) for shard in shards]).to(self._device)
            for batch in range(len(ids.batches))
        ]
        measured = measure(embeddings, batches, self._config).cost.per_rank[0]
        if self._device.type == "cuda":
            # sharded modules lie in reference cycles, and their tables are no views of an arena
            del embeddings
            gc.collect()
        return dataclasses.replace(measured, fwd_comm_ms=0.0, bwd_comm_ms=0.0)


class PlanBench:
    """What plans cost, rank after rank on a bench; their exchanges as a cost model predicts them.

    Args:
        num_batches: of ids, drawn anew for every plan.
    """

    def __init__(self, bench: Bench, model: CostModel, *, num_batches: int, seed: int) -> None:
        self._bench = bench
        self._model = model
        self._num_batches = num_batches
        self._rng = np.random.default_rng(seed)

    def measure(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        """The four stages of every rank."""
        ids = draw_ids(
            task.tables,
            batch_size=task.batch_size,
            num_batches=self._num_batches,
            seed=int(self._rng.integers(2**32)),
        )
        ranks = []
        for rank, predicted in enumerate(self._model.predict(plan, task).per_rank):
            shards = [shard for shard in plan.shards if shard.rank == rank]
            measured = self._bench.measure(shards, ids) if shards else StageCost(0.0, 0.0, 0.0, 0.0)
            ranks.append(
                dataclasses.replace(
                    measured, fwd_comm_ms=predicted.fwd_comm_ms, bwd_comm_ms=predicted.bwd_comm_ms
                )
            )
        return PlanCost(tuple(ranks))


def _jagged(ids: Sequence[Ids]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=[f"t{i}" for i in range(len(ids))],
        values=torch.from_numpy(np.concatenate([of_table.values for of_table in ids])),
        lengths=torch.from_numpy(np.concatenate([of_table.lengths for of_table in ids])),
    )
