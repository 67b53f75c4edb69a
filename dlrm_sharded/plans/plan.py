"""A plan: rectangles of tables on ranks, which all sharders return and everything else reads."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm_sharded.files.errors import InvalidPlanError, check_choice
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.files.json_forms import form_of, read_form
from dlrm_sharded.plans.precision import FP32_EXCHANGE, TABLE_BYTES, ExchangePrecision
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology

if TYPE_CHECKING:
    import polars

log = logging.getLogger(__name__)

Interval = tuple[int, int]

PLAN_KEYS = {
    *("sharder", "costs", "world_size", "shards", "solve_s", "exchange_precision"),
    *("lower_bound_ms", "gap", "caveat", "prices", "profiles", "predicted"),
    "made_from",
}
"""Keys of plan.json: the keys of a plan, and the keys that a report adds."""


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """The rectangle `rows` x `cols` (both half-open) of one table, on one rank.

    Args:
        replicated: whether every rank holds this whole table and looks up its own samples in it.
        precision: of the weights, one of `TABLE_BYTES`; the same for all shards of a table.
    """

    table: str
    rank: int
    rows: Interval
    cols: Interval
    replicated: bool = False
    precision: str = "fp32"

    def __post_init__(self) -> None:
        check_choice("the precision of a shard", self.precision, TABLE_BYTES)

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_cols(self) -> int:
        return self.cols[1] - self.cols[0]

    @classmethod
    def whole(cls, table: Table, rank: int) -> Shard:
        """Return a whole table as one shard."""
        return cls(
            table.name,
            rank,
            (0, table.num_embeddings),
            (0, table.embedding_dim),
            precision=table.precision,
        )

    def bytes_on(self, topology: Topology) -> int:
        """Return the memory of the shard: weights, optimizer state, gradients of a replica."""
        return topology.shard_bytes(
            self.table,
            self.num_rows,
            self.num_cols,
            replicated=self.replicated,
            precision=self.precision,
        )

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights alone."""
        return self.num_rows * self.num_cols * TABLE_BYTES[self.precision]

    def __str__(self) -> str:
        if self.replicated:
            return f"replica of {self.table} on rank {self.rank}"
        return (
            f"{self.table}[{self.rows[0]}:{self.rows[1]}, {self.cols[0]}:{self.cols[1]}]"
            f" on rank {self.rank}"
        )


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The shards of all tables; they tile every table exactly, or are whole on every rank.

    Args:
        exchange_precision: precision of what the ranks exchange.
    """

    world_size: int
    shards: tuple[Shard, ...]
    exchange_precision: ExchangePrecision = FP32_EXCHANGE

    @classmethod
    def from_ranks(cls, task: ShardingTask, ranks: Sequence[int]) -> ShardingPlan:
        """Return the plan that places every table of a task whole, the i-th on `ranks[i]`."""
        placed = zip(task.tables, ranks, strict=True)
        shards = tuple(Shard.whole(table, int(rank)) for table, rank in placed)
        return cls(task.topology.world_size, shards)

    def __repr__(self) -> str:
        by_table, counts = self.shards_by_table(), [len(held) for held in self.shards_by_rank()]
        num_whole = sum(len(shards) == 1 for shards in by_table.values())
        num_replicated = len(self.replicated_tables)
        return (
            f"ShardingPlan: {len(by_table)} tables in {len(self.shards)} shards on "
            f"{self.world_size} ranks\n"
            f"  {num_whole} whole, {len(by_table) - num_whole - num_replicated} split, "
            f"{num_replicated} replicated\n"
            f"  {min(counts)} to {max(counts)} a rank, exchanges in {self.exchange_precision}"
        )

    def to_frame(self) -> polars.DataFrame:
        """Return a row per shard: table, rank, half-open rows and columns, precision, replica."""
        import polars  # takes longer to load than most plans take to make

        names = ("table", "rank", "first_row", "end_row", "first_col", "end_col")
        rows = [(s.table, s.rank, *s.rows, *s.cols, s.replicated, s.precision) for s in self.shards]
        return polars.DataFrame(rows, schema=[*names, "replicated", "precision"], orient="row")

    def shards_by_table(self) -> dict[str, list[Shard]]:
        """Return the shards by table, ordered by their place in it."""
        grouped: dict[str, list[Shard]] = defaultdict(list)
        for shard in sorted(self.shards, key=lambda s: (s.rows, s.cols, s.rank)):
            grouped[shard.table].append(shard)
        return dict(grouped)

    def shards_by_rank(self) -> list[list[Shard]]:
        """Return the shards of every rank, in their order in the plan."""
        by_rank: list[list[Shard]] = [[] for _ in range(self.world_size)]
        for shard in self.shards:
            by_rank[shard.rank].append(shard)
        return by_rank

    @property
    def replicated_tables(self) -> tuple[str, ...]:
        """Names of the tables that every rank has, in the order of the plan."""
        return tuple(dict.fromkeys(shard.table for shard in self.shards if shard.replicated))

    def half_tables(self) -> list[str]:
        """Return the names of the tables whose weights are in fp16, sorted."""
        return sorted({shard.table for shard in self.shards if shard.precision == "fp16"})

    def bytes_by_rank(self, topology: Topology) -> list[int]:
        """Return the memory that the plan takes on each rank."""
        used = [0] * self.world_size
        for shard in self.shards:
            used[shard.rank] += shard.bytes_on(topology)
        return used

    def to_json(self) -> dict[str, Any]:
        """Return what plan.json says of the plan itself.

        Precisions appear only if they are not fp32, because older readers warn of these keys, and
        `replicated` appears only for replicas.
        """
        fields: dict[str, Any] = {
            "world_size": self.world_size,
            "shards": [form_of(shard) for shard in self.shards],
        }
        if not self.exchange_precision.is_exact:
            fields["exchange_precision"] = self.exchange_precision.to_json()
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], *, name: str = "the plan") -> ShardingPlan:
        """Read a plan in the form of plan.json, and ignore the keys of a report.

        Args:
            name: what to call the plan in messages.

        Raises:
            InvalidPlanError: a key is missing or has a value of the wrong kind.
        """
        name = f"{name} does not have the form of a plan.json"
        own = {key: fields[key] for key in cls.__dataclass_fields__ if key in fields}
        return read_form(own, cls, name=name, error=InvalidPlanError)


def read_plan(path: str | Path) -> ShardingPlan:
    """Read a plan.json.

    Raises:
        ConfigError: the file is missing or is not JSON.
        InvalidPlanError: the file does not describe a plan.
    """
    fields = read_json_object(path, noun="plan")
    plan = ShardingPlan.from_json(fields, name=f"the plan file {path}")
    if unknown := sorted(set(fields) - PLAN_KEYS):
        log.warning("the plan file %s has unknown keys, which have no effect: %s", path, unknown)
    return plan


def with_precisions(task: ShardingTask, plan: ShardingPlan) -> ShardingTask:
    """Return the task with tables and exchanges in the precisions of a plan."""
    by_table = dict.fromkeys((table.name for table in task.tables), "fp32")
    by_table |= {shard.table: shard.precision for shard in plan.shards}
    if any(table.precision != by_table[table.name] for table in task.tables):
        task = task.with_values(precision=by_table)
    if task.exchange_precision == plan.exchange_precision:
        return task
    return dataclasses.replace(task, exchange_precision=plan.exchange_precision)


def with_exchanges_of(plan: ShardingPlan, task: ShardingTask) -> ShardingPlan:
    """Return the plan with the exchange precision of the task, unless the plan sets its own."""
    if not plan.exchange_precision.is_exact or task.exchange_precision.is_exact:
        return plan
    return dataclasses.replace(plan, exchange_precision=task.exchange_precision)


def with_precisions_of(plan: ShardingPlan, task: ShardingTask) -> ShardingPlan:
    """Return the plan with its tables in the precisions of the task; replicas stay in fp32."""
    precision = {table.name: table.precision for table in task.tables}
    shards = (
        shard if shard.replicated else dataclasses.replace(shard, precision=precision[shard.table])
        for shard in plan.shards
    )
    return dataclasses.replace(plan, shards=tuple(shards))
