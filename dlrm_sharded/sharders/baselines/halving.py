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

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from dlrm_sharded.files.errors import (
    ConfigError,
    InfeasibleTaskError,
    check_count,
    check_flag,
    check_number,
)
from dlrm_sharded.plans.layouts import Replicas, trained_layouts
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.plans.task_keys import MAX_BYTES
from dlrm_sharded.plans.validation import why_too_wide
from dlrm_sharded.sharders.baselines.halving_placer import (
    Placer,
    ShardLoad,
    SplitRules,
    num_weights,
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
        load: price of a shard.
        exchange_ids: price of an exchange on one host and on several: the ratio of the bandwidths
            of memory and links, by the ratio of the work in memory and on links.
        host_factor: factor on that price if hosts are the buckets.
    """

    load: ShardLoad
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


@dataclass(frozen=True, slots=True, eq=False)
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

    method: str
    _: KW_ONLY
    strategy: str = "auto"
    replicate: bool = True
    replicate_below_gib: float = 0.008
    exchange_ids: float | None = None
    num_placements: int = 20
    min_partition: int = 32

    def __post_init__(self) -> None:
        for key, value, known in (
            ("method", self.method, [*METHODS]),
            ("strategy", self.strategy, [*STRATEGIES]),
        ):
            if value not in known:
                raise ConfigError(f"sharder.{key} is {value!r}; known: {', '.join(known)}")
        check_flag("sharder.replicate", self.replicate)
        check_number("sharder.replicate_below_gib", self.replicate_below_gib, most=MAX_BYTES / GIB)
        if self.exchange_ids is not None:
            check_number("sharder.exchange_ids", self.exchange_ids)
        check_count("sharder.num_placements", self.num_placements, least=1)
        check_count("sharder.min_partition", self.min_partition, least=COLUMN_MULTIPLE)

    @property
    def name(self) -> str:
        return self.method + "_hier" * self._on_hosts

    @property
    def _on_hosts(self) -> bool:
        return self.strategy == "hier_auto"

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

    def _rules(self, topology: Topology) -> SplitRules:
        num_hosts = topology.world_size // topology.ranks_per_host
        if self._on_hosts and num_hosts == 1:
            raise InfeasibleTaskError(
                f"sharder.strategy=hier_auto places tables on hosts, and all {topology.world_size} "
                "ranks are on one; use sharder.strategy=auto"
            )
        method, exchange_ids = METHODS[self.method], self.exchange_ids
        if exchange_ids is None:
            exchange_ids = method.exchange_ids[num_hosts > 1]
        if self._on_hosts:
            exchange_ids *= method.host_factor
        return SplitRules(topology, self._on_hosts, self.min_partition, method.load, exchange_ids)

    def _small_tables(self, task: ShardingTask) -> Sequence[Table]:
        """Return the tables to replicate, the smallest ones first."""
        topology = task.topology
        if topology.world_size == 1 or not (self.replicate and task.can_replicate):
            return []
        small = [
            table
            for table in task.tables
            if num_weights(table) * REPLICA_WEIGHT_BYTES < self.replicate_below_gib * GIB
            and table.embedding_dim <= topology.max_shard_columns
            and "replicas" in trained_layouts(table, topology)
        ]
        return sorted(small, key=lambda table: (num_weights(table), -table.pooling_factor))

    def _plan(
        self, task: ShardingTask, replicated: Sequence[Table], rules: SplitRules
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
        shards = Placer(tables, task.topology, free, rules).best_shards(self.num_placements)
        return None if shards is None else ShardingPlan(world_size, (*replicas, *shards))
