"""HugeCTR's planner for DLRM-DCNv2, which made NVIDIA's plans for MLPerf training.

Source: `auto` and `hier_auto` of `samples/dlrm/sharding` in NVIDIA-Merlin/HugeCTR. Small tables are
replicated. The others are placed by ids, the table with the most ids per shard is halved, and all
are placed anew, up to 20 times. A shard's exchange costs as much as some further ids.

Departures, most of them for the layouts that TorchRec trains:
- HugeCTR distributes the rows of a table in turn over any 2, 4, 8, ... GPUs. TorchRec has row
  blocks on the ranks of one host or on all ranks only. So `auto` halves columns: a half reads half
  as many bytes for all ids, in place of all bytes for half of the ids. Columns are not halved
  below `min_partition`, where lookups would gain little; the table's rows are split next, over one
  host and then over all ranks.
- A half keeps the price of its exchange, as in the original: a column half sends half a vector,
  but receives all ids.
- `hier_auto` takes hosts for buckets, and a table lies in row blocks on a host's ranks. There, the
  original halves a table over any 2, 4, ... hosts; here it goes from one host to all of them.
- The original compares with a plan that splits every table over all ranks, small ones included;
  here these stay replicated in it, too. It also ends with an error where replicas leave too little
  memory, and counts the replicas of `hier_auto` once for a host. Here each rank's memory is
  counted, and the larger replicas are given up where it is short.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_sharded.errors import ConfigError, InfeasibleTaskError, check_count, check_number
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
from dlrm_sharded.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.task import GIB, MAX_BYTES, ShardingTask, Topology

STRATEGIES = ("auto", "hier_auto")
"""Buckets for tables: the ranks, or the hosts."""

EXCHANGE_IDS_ON_A_HOST, EXCHANGE_IDS = 7 / 4, 67 / 4
"""Price of a shard's exchange on one host and on several, as in NVIDIA's settings for H100: the
ratio of the bandwidths of memory and links, by the ratio of the work in memory and on links."""


class HugeCtrSharder:
    """Replicates small tables, and places the others by ids, halving the busiest ones.

    Args:
        strategy: one of `STRATEGIES`; NVIDIA uses `auto` on one host, `hier_auto` on several.
        replicate: whether to replicate small tables; never done on one rank.
        replicate_below_gib: tables below this size are replicated, counted with 8 B for a weight
            and its state in whatever optimizer. NVIDIA's plans have 0.008 on one host, 0.0125 on
            several.
        exchange_ids: price of a shard's exchange, in lookups of ids per sample; None for NVIDIA's
            figure for H100.
        num_placements: number of placements to compare.
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
        self.name = "hugectr" if strategy == "auto" else "hugectr_hier"
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
        return halved_columns(table, split, self.topology, self.min_partition) or rows

    def load(self, table: Table, num_cols: int, group_size: int) -> float:
        """Return ids per sample: of a host's ranks together if hosts are the buckets."""
        num_ids = table.pooling_factor * num_cols / table.embedding_dim / group_size
        together = self.topology.ranks_per_host if self.on_hosts else 1
        return num_ids * together + self.exchange_ids


def check_options(
    strategy: str,
    replicate_below_gib: float,
    exchange_ids: float | None,
    num_placements: int,
    min_partition: int,
) -> None:
    """Raise ConfigError unless the options that NVIDIA's planners share can be used."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"sharder.strategy is {strategy!r}; known: {', '.join(STRATEGIES)}")
    check_number("sharder.replicate_below_gib", replicate_below_gib, most=MAX_BYTES / GIB)
    if exchange_ids is not None:
        check_number("sharder.exchange_ids", exchange_ids)
    check_count("sharder.num_placements", num_placements, least=1)
    check_count("sharder.min_partition", min_partition, least=COLUMN_MULTIPLE)


def check_hosts(topology: Topology, *, on_hosts: bool) -> None:
    """Raise InfeasibleTaskError if hosts are the buckets and there is only one."""
    if on_hosts and num_hosts(topology) == 1:
        raise InfeasibleTaskError(
            f"sharder.strategy=hier_auto places tables on hosts, and all {topology.world_size} "
            "ranks are on one; use sharder.strategy=auto"
        )


def num_hosts(topology: Topology) -> int:
    """Return the number of hosts of the ranks."""
    return topology.world_size // topology.ranks_per_host
