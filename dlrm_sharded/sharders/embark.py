"""EMBark's planner (RecSys 2024): HugeCTR's, with tables of any width, split by rows or columns.

Source: the paper's abstract, NVIDIA's published summaries of it, and the planner in
`benchmarks/embedding_collection` of NVIDIA-Merlin/HugeCTR, which has the paper's benchmark models.
The paper's full text was not at hand.

EMBark groups tables into clusters by how their exchange is compressed. The data-parallel cluster is
replicated. Tables of the reduction-based cluster exchange vectors summed over a sample's ids, as
TorchRec does. They are placed greedily, by the columns that they read and exchange. The busiest one
is split by rows or by columns, whichever predicts the lower load, up to 20 times.

Departures:
- The unique-based cluster, which exchanges each distinct row of a batch once, has no counterpart in
  TorchRec's bags. Its tables join the reduction-based cluster.
- A shard of EMBark is a part of a table's rows and of its columns, on any rank. TorchRec trains
  ranges of columns on any ranks, or row blocks on the ranks of one host or on all ranks, and not
  both on one table. `hier_auto` splits rows only.
- The number of replicated tables is an input of the original, which takes the smallest. Here the
  limit is a size, as in `sharder=hugectr`, whose memory limits hold here, too.
- As in the original, the exchange of ids and the all-reduce of replicas have no price.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.sharders.halving import (
    Split,
    halved_columns,
    in_one_host,
    larger_group,
    plan_by_halving,
    smallest_tables,
    whole_table,
)
from dlrm_sharded.sharders.hugectr import (
    EXCHANGE_IDS_ON_A_HOST,
    check_hosts,
    check_options,
    num_hosts,
)
from dlrm_sharded.tables import Table
from dlrm_sharded.task import GIB, ShardingTask, Topology

EXCHANGE_IDS = 60 / 4
"""Price of exchanging a column between hosts, in lookups of it; from the original's benchmark."""

HOST_EXCHANGE = 1.5
"""Factor on the price of an exchange where the ranks of a host reduce vectors among them first."""


class EmbarkSharder:
    """Replicates small tables, and places the others by the columns that they read and exchange.

    Args:
        strategy: buckets for tables, "auto" for the ranks, or "hier_auto" for the hosts.
        replicate, replicate_below_gib, num_placements: see `HugeCtrSharder`.
        exchange_ids: price of exchanging a column of a sample's vector, in lookups of a column;
            None for NVIDIA's figure for H100.
        min_partition: smallest width to which columns are halved.
    """

    def __init__(
        self,
        *,
        strategy: str = "auto",
        replicate: bool = True,
        replicate_below_gib: float = 0.008,
        exchange_ids: float | None = None,
        num_placements: int = 20,
        min_partition: int = 32,
    ) -> None:
        check_options(strategy, replicate_below_gib, exchange_ids, num_placements, min_partition)
        self.name = "embark" if strategy == "auto" else "embark_hier"
        self._on_hosts = strategy == "hier_auto"
        self._replicate_below = replicate_below_gib * GIB if replicate else 0.0
        self._exchange_ids = exchange_ids
        self._num_placements = num_placements
        self._min_partition = min_partition

    def shard(self, task: ShardingTask) -> ShardingPlan:
        check_hosts(task.topology, on_hosts=self._on_hosts)
        exchange_ids = self._exchange_ids
        if exchange_ids is None:
            exchange_ids = EXCHANGE_IDS if num_hosts(task.topology) > 1 else EXCHANGE_IDS_ON_A_HOST
        rules = _Rules(task.topology, self._on_hosts, exchange_ids, self._min_partition)
        replicated = smallest_tables(task, self._replicate_below)
        return plan_by_halving(task, replicated, rules, self._num_placements)


@dataclass(frozen=True, slots=True)
class _Rules:
    topology: Topology
    on_hosts: bool
    exchange_ids: float
    min_partition: int

    def first(self, table: Table) -> Split:
        first = in_one_host if self.on_hosts else whole_table
        return first(table, self.topology)

    def finer(self, table: Table, split: Split) -> list[Split]:
        rows = larger_group(table, split, self.topology)
        if self.on_hosts:
            return rows
        return halved_columns(table, split, self.topology, self.min_partition) + rows

    def load(self, table: Table, num_cols: int, group_size: int) -> float:
        """Return columns per sample: of a host's ranks together if hosts are the buckets."""
        if not self.on_hosts:
            return num_cols * (table.pooling_factor / group_size + self.exchange_ids)
        num_ids = table.pooling_factor / group_size * self.topology.ranks_per_host
        return num_cols * (num_ids + HOST_EXCHANGE * self.exchange_ids)
