"""NVIDIA's planners, of HugeCTR and EMBark: replicas, and the busiest tables halved.

HugeCTR: `auto` and `hier_auto` of `samples/dlrm/sharding` in NVIDIA-Merlin/HugeCTR, which made
NVIDIA's plans of DLRM-DCNv2 for MLPerf. Small tables are replicated. The others are placed by their
ids, the table with the most ids per shard is halved, and all are placed anew, up to 20 times. The
exchange of a shard costs as much as some further ids.

EMBark (RecSys 2024) counts columns, those that a shard reads and those that it exchanges. It groups
tables by how their exchange is compressed: the data-parallel cluster is replicated, and tables of
the reduction-based cluster exchange vectors summed over the ids of a sample, as TorchRec does.
Sources are the paper's abstract, NVIDIA's summaries of it, and the planner with the paper's models
in `benchmarks/embedding_collection` of the same repository. The paper's full text was not at hand.

Departures, most of them for the layouts that TorchRec trains:
- HugeCTR distributes the rows of a table in turn over any 2, 4, 8, ... GPUs; EMBark does so with
  columns, too. TorchRec has columns on any ranks, or row blocks on the ranks of one host or on all
  ranks. So `auto` halves columns: a half reads half as many bytes for all ids, in place of all
  bytes for half of the ids. At `min_partition`, below which a lookup gains little, the rows are
  split instead, over one host and then over all ranks.
- EMBark compares a split by rows with one by columns. By its prices, a column half is never dearer,
  as it halves the exchange, too; so columns come first here.
- In HugeCTR's price a column half keeps the exchange of a whole vector, as a row half does there:
  it sends half a vector, but receives all ids.
- `hier_auto` takes hosts for buckets, and a table lies in row blocks on a host's ranks. There, the
  originals halve a table over any 2, 4, ... hosts; here it goes from one host to all of them.
- EMBark's unique-based cluster, which exchanges each distinct row of a batch once, has no
  counterpart in TorchRec's bags. Its tables join the reduction-based cluster.
- EMBark replicates a given number of the smallest tables; here a size is given, as for HugeCTR.
- The originals compare with a plan that splits every table over all ranks; here, small tables stay
  replicated in it. They end with an error where replicas leave too little memory, and `hier_auto`
  counts these once for a host. Here the memory of each rank is counted, and the larger replicas are
  given up where it is short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.files.errors import (
    ConfigError,
    InfeasibleTaskError,
    check_count,
    check_flag,
    check_number,
)
from dlrm_sharded.plans.layouts import Replicas
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import GIB, MAX_BYTES, ShardingTask, Topology
from dlrm_sharded.plans.validation import why_too_wide
from dlrm_sharded.sharders.baselines.halving_placer import (
    Placer,
    Split,
    halved_columns,
    in_one_host,
    larger_group,
    num_weights,
    whole_table,
)
from dlrm_sharded.sharders.heuristics import GreedySharder

STRATEGIES = ("auto", "hier_auto")
"""Buckets for tables: the ranks, or the hosts."""

REPLICA_WEIGHT_BYTES = 8
"""Bytes of a weight by which small tables are chosen: NVIDIA counts its Adagrad state with it."""


@dataclass(frozen=True, slots=True)
class Method:
    """How a planner prices a shard, with NVIDIA's figures for H100 GPUs.

    Args:
        load: price of a shard from its ids per sample, its columns, its share of the table's
            columns, and the price of its exchange in ids.
        exchange_ids: price of an exchange on one host and on several: the ratio of the bandwidths
            of memory and links, by the ratio of the work in memory and on links.
        host_factor: factor on that price if hosts are the buckets.
    """

    load: Callable[[float, int, float, float], float]
    exchange_ids: tuple[float, float]
    host_factor: float = 1.0


METHODS = {
    "hugectr": Method(
        load=lambda num_ids, _, share, exchange_ids: num_ids * share + exchange_ids,
        exchange_ids=(7 / 4, 67 / 4),
    ),
    "embark": Method(
        load=lambda num_ids, num_cols, _, exchange_ids: num_cols * (num_ids + exchange_ids),
        exchange_ids=(7 / 4, 60 / 4),
        host_factor=1.5,
    ),
}


class HalvingSharder:
    """Replicates small tables, and places the others greedily, halving the busiest ones.

    Args:
        method: one of `METHODS`.
        strategy: one of `STRATEGIES`; NVIDIA uses `auto` on one host, `hier_auto` on several.
        replicate: whether to replicate small tables; never done on one rank, nor under an
            optimizer that trains no replicas.
        replicate_below_gib: tables below this size are replicated, counted with 8 B for a weight
            and its state in whatever optimizer. NVIDIA's plans have 0.008 on one host, 0.0125 on
            several.
        exchange_ids: price of a shard's exchange, in lookups of ids per sample; None for the
            method's figure.
        num_placements: number of placements to compare.
        min_partition: smallest width to which columns are halved.
    """

    def __init__(
        self,
        method: str,
        *,
        strategy: str = "auto",
        replicate: bool = True,
        replicate_below_gib: float = 0.008,
        exchange_ids: float | None = None,
        num_placements: int = 20,
        min_partition: int = 32,
    ) -> None:
        for key, value, known in (
            ("method", method, [*METHODS]),
            ("strategy", strategy, [*STRATEGIES]),
        ):
            if value not in known:
                raise ConfigError(f"sharder.{key} is {value!r}; known: {', '.join(known)}")
        check_flag("sharder.replicate", replicate)
        check_number("sharder.replicate_below_gib", replicate_below_gib, most=MAX_BYTES / GIB)
        if exchange_ids is not None:
            check_number("sharder.exchange_ids", exchange_ids)
        check_count("sharder.num_placements", num_placements, least=1)
        check_count("sharder.min_partition", min_partition, least=COLUMN_MULTIPLE)
        self._method = METHODS[method]
        self._on_hosts = strategy == "hier_auto"
        self.name = method + "_hier" * self._on_hosts
        self._replicate_below_bytes = replicate_below_gib * GIB if replicate else 0.0
        self._exchange_ids = exchange_ids
        self._num_placements = num_placements
        self._min_partition = min_partition

    def shard(self, task: ShardingTask) -> ShardingPlan:
        if reason := why_too_wide(task):
            raise InfeasibleTaskError(reason)
        rules, replicated = self._rules(task.topology), self._small_tables(task)
        while (plan := self._plan(task, replicated, rules)) is None:
            if (
                not replicated
            ):  # the packing of whole tables fits more, or says why there is no plan
                return GreedySharder("size").shard(task)
            replicated = replicated[: len(replicated) // 2]
        return plan

    def _rules(self, topology: Topology) -> _Rules:
        num_hosts = topology.world_size // topology.ranks_per_host
        if self._on_hosts and num_hosts == 1:
            raise InfeasibleTaskError(
                f"sharder.strategy=hier_auto places tables on hosts, and all {topology.world_size} "
                "ranks are on one; use sharder.strategy=auto"
            )
        exchange_ids = self._exchange_ids
        if exchange_ids is None:
            exchange_ids = self._method.exchange_ids[num_hosts > 1]
        if self._on_hosts:
            exchange_ids *= self._method.host_factor
        return _Rules(topology, self._method, self._on_hosts, exchange_ids, self._min_partition)

    def _small_tables(self, task: ShardingTask) -> Sequence[Table]:
        """Return the tables to replicate, the smallest ones first."""
        topology = task.topology
        if topology.world_size == 1 or not task.can_replicate:
            return []
        small = [
            table
            for table in task.tables
            if num_weights(table) * REPLICA_WEIGHT_BYTES < self._replicate_below_bytes
            and table.embedding_dim <= topology.max_shard_columns
            and "replicas" in table.layouts
        ]
        return sorted(small, key=lambda table: (num_weights(table), -table.pooling_factor))

    def _plan(
        self, task: ShardingTask, replicated: Sequence[Table], rules: _Rules
    ) -> ShardingPlan | None:
        """Return the best plan with these replicas; None if none was found within the memory."""
        world_size = task.topology.world_size
        replicas = [s for table in replicated for s in Replicas(world_size).shards(table)]
        names = {table.name for table in replicated}
        tables = [table for table in task.tables if table.name not in names]
        used = ShardingPlan(world_size, tuple(replicas)).bytes_by_rank(task.topology)
        free = np.array(task.topology.rank_memory_bytes, dtype=np.int64) - used
        if free.min() < 0:
            return None
        shards = Placer(tables, task.topology, free, rules).best_shards(self._num_placements)
        return None if shards is None else ShardingPlan(world_size, (*replicas, *shards))


@dataclass(frozen=True, slots=True)
class _Rules:
    topology: Topology
    method: Method
    on_hosts: bool
    exchange_ids: float
    min_partition: int

    def first(self, table: Table) -> Split:
        first = in_one_host if self.on_hosts else whole_table
        return first(table, self.topology)

    def finer(self, table: Table, split: Split) -> Split | None:
        columns = None
        if not self.on_hosts:
            columns = halved_columns(table, split, self.topology, self.min_partition)
        return columns or larger_group(table, split, self.topology)

    def load(self, table: Table, num_cols: int, group_size: int) -> float:
        """Return the price of a piece: of a host's ranks together if hosts are the buckets."""
        together = self.topology.ranks_per_host if self.on_hosts else 1
        num_ids = table.pooling_factor * together / group_size
        return self.method.load(
            num_ids, num_cols, num_cols / table.embedding_dim, self.exchange_ids
        )
