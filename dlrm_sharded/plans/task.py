"""The input of a sharder: tables, the topology of the ranks, and the batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm_sharded.files.errors import ConfigError, check_choice, check_count, check_number
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.files.json_forms import Number, form_of, make_plain, read_form
from dlrm_sharded.plans.precision import FP32_EXCHANGE, TABLE_BYTES, ExchangePrecision
from dlrm_sharded.plans.table_optimizers import CAN_REPLICATE, STATE_BYTES, memory_of, why_not_fused
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, MAX_SHARD_COLUMNS, Table

MEMORY_KEYS = "topology.memory_gib, or memory_bytes of task.json or Topology"
"""Where users set the memory of a rank, for messages."""

OPTIMIZER_KEYS = ("bytes_per_element", "optimizer_bytes_per_row")
"""Keys of a topology that an optimizer of tables decides, in the order of `memory_of`."""

MAX_RANKS, MAX_BYTES = 2**20, 2**60
"""Limits beyond any real job, below which sums of sizes are exact in 64 bits."""

MIN_BANDWIDTH, MAX_BANDWIDTH = 1.0, 1e18
"""Limits beyond any real link, in bytes/s, between which predicted times are finite."""

BANDWIDTHS = ("intra_host_bytes_per_s", "inter_host_bytes_per_s")
"""Keys of a topology that are bandwidths; all are optional."""

MAX_BATCH_SIZE = 2**40

GIB = 2**30
REPLICA_GRADIENT_BYTES = 8
"""Memory for the gradient of one weight of a replica: an fp32 copy each in lookup and all-reduce.

Other tables have none: their optimizer is fused into the backward pass of the lookup.
"""


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a job; the first `local_world_size` ranks are on host 0, and so on.

    Args:
        memory_bytes: memory of one rank for tables: weights and optimizer state.
        memory_bytes_by_rank: memory of each rank if they differ, instead of `memory_bytes`; read
            `rank_memory_bytes` in either case.
        local_world_size: ranks per host; None if all ranks are on one host.
        bytes_per_element: memory of one weight with its element-wise optimizer state:
            4 for SGD and row-wise Adagrad in fp32, 12 for Adam.
        optimizer_bytes_per_row: optimizer state per row of a shard: 4 for row-wise Adagrad.
        compute_device: "cuda" or "cpu"; TorchRec's planner offers fewer plans on a CPU.
        intra_host_bytes_per_s, inter_host_bytes_per_s: bandwidth at which one rank sends to all
            ranks of its host together, and to those of other hosts; None if not known.
        optimizer_bytes_by_table: optimizer state of a table in bytes per weight and per row of a
            shard, by its name, if tables have optimizers of their own. For other tables,
            `bytes_per_element` and `optimizer_bytes_per_row` count.
        column_limit: largest width of a shard that the ranks' lookups support, if it is less than
            that of `MAX_SHARD_COLUMNS`; read `max_shard_columns` in either case.

    Raises:
        ConfigError: a value is out of range, or `local_world_size` does not divide `world_size`.
    """

    world_size: int
    memory_bytes: int
    local_world_size: int | None = None
    bytes_per_element: int = 4
    optimizer_bytes_per_row: int = 0
    compute_device: str = "cuda"
    intra_host_bytes_per_s: Number | None = None
    inter_host_bytes_per_s: Number | None = None
    memory_bytes_by_rank: tuple[int, ...] | None = None
    optimizer_bytes_by_table: dict[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    column_limit: int | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_count("topology.world_size", self.world_size, least=1, most=MAX_RANKS)
        check_count("topology.memory_bytes", self.memory_bytes, least=1, most=MAX_BYTES)
        if (by_rank := self.memory_bytes_by_rank) is not None and len(by_rank) != self.world_size:
            raise ConfigError(
                f"topology.memory_bytes_by_rank has {len(by_rank):,} figures; it must have one for "
                f"each of the {self.world_size:,} ranks of topology.world_size"
            )
        for rank, memory_bytes in enumerate(by_rank or ()):
            key = f"topology.memory_bytes_by_rank[{rank}]"
            check_count(key, memory_bytes, least=1, most=MAX_BYTES)
        check_count("topology.bytes_per_element", self.bytes_per_element, least=1, most=64)
        states = {"optimizer_bytes_per_row": self.optimizer_bytes_per_row}
        for table, state in self.optimizer_bytes_by_table.items():
            states[f"optimizer_bytes_by_table[{table!r}][0]"] = state[0]
            states[f"optimizer_bytes_by_table[{table!r}][1]"] = state[1]
        for key, num_bytes in states.items():
            check_count(f"topology.{key}", num_bytes, least=0, most=2**20)
        for key in BANDWIDTHS:
            if (value := getattr(self, key)) is not None:
                check_number(f"topology.{key}", value, least=MIN_BANDWIDTH, most=MAX_BANDWIDTH)
        check_choice("topology.compute_device", self.compute_device, MAX_SHARD_COLUMNS)
        if self.column_limit is not None:
            check_count("topology.column_limit", self.column_limit, least=COLUMN_MULTIPLE)
        if self.local_world_size is None:
            return
        check_count("topology.local_world_size", self.local_world_size, least=1)
        if self.world_size % self.local_world_size:
            raise ConfigError(
                f"topology.local_world_size is {self.local_world_size}, "
                f"must divide topology.world_size = {self.world_size}"
            )

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on every host."""
        return self.local_world_size or self.world_size

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups of ranks that can share row blocks: all ranks, and those of a host.

        Groups of size g are the ranks 0 to g - 1, g to 2 g - 1, ...
        """
        sizes = dict.fromkeys((self.world_size, self.ranks_per_host))
        return tuple(size for size in sizes if size > 1)

    @property
    def max_shard_columns(self) -> int:
        """Largest width of a shard that the ranks' lookups support."""
        return self.column_limit or MAX_SHARD_COLUMNS[self.compute_device]

    @property
    def rank_memory_bytes(self) -> tuple[int, ...]:
        """Memory of each rank for tables."""
        return self.memory_bytes_by_rank or (self.memory_bytes,) * self.world_size

    @property
    def rank_memory_text(self) -> str:
        """Memory of a rank in GiB, for messages; a range if the ranks differ."""
        memory = self.rank_memory_bytes
        least, most = f"{min(memory) / GIB:.2f}", f"{max(memory) / GIB:.2f}"
        return f"{most} GiB" if least == most else f"{least} to {most} GiB"

    def optimizer_bytes(self, table: str) -> tuple[int, int]:
        """Return the optimizer state of a table, in bytes per weight and per row of a shard."""
        default = self.bytes_per_element - TABLE_BYTES["fp32"], self.optimizer_bytes_per_row
        return self.optimizer_bytes_by_table.get(table, default)

    def shard_bytes(
        self,
        table: str,
        num_rows: int,
        num_cols: int,
        *,
        replicated: bool = False,
        precision: str = "fp32",
    ) -> int:
        """Return the memory of `num_rows` x `num_cols` weights and their optimizer state.

        Args:
            table: name of their table.
            replicated: whether the weights are a replica, which has gradients in memory, too.
        """
        per_weight, per_row = self.optimizer_bytes(table)
        per_weight += TABLE_BYTES[precision] + replicated * REPLICA_GRADIENT_BYTES
        return num_rows * (num_cols * per_weight + per_row)

    def table_bytes(self, table: Table) -> int:
        """Return the memory of a whole table as one shard."""
        return self.shard_bytes(
            table.name, table.num_embeddings, table.embedding_dim, precision=table.precision
        )

    def to_json(self) -> dict[str, Any]:
        """Return the form of the topology in task.json."""
        always = ("bytes_per_element", "optimizer_bytes_per_row", "compute_device")
        fields = form_of(self) | {key: getattr(self, key) for key in always}
        fields["local_world_size"] = self.ranks_per_host
        if not self.optimizer_bytes_by_table:
            del fields["optimizer_bytes_by_table"]
        return fields


@dataclass(frozen=True, slots=True)
class ShardingTask:
    """The problem of placing `tables` on `topology` to train with a global `batch_size`.

    Args:
        optimizer: fused optimizer of the tables, a key of `STATE_BYTES`, whose state the topology
            counts; None if it is not stated. Read `known_optimizer` in either case.
        exchange_precision: precision of what ranks exchange.

    Raises:
        ConfigError: there are no tables, two have the same name, or the optimizer cannot be used.
    """

    tables: tuple[Table, ...]
    topology: Topology
    batch_size: int
    optimizer: str | None = None
    exchange_precision: ExchangePrecision = FP32_EXCHANGE

    def __post_init__(self) -> None:
        make_plain(self)
        if not self.tables:
            raise ConfigError("the task has no tables; give it at least one")
        check_count("batch_size", self.batch_size, least=1, most=MAX_BATCH_SIZE)
        if self.optimizer is not None:
            self._check_optimizer(self.optimizer)
        names = [table.name for table in self.tables]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"{names.count(twice)} tables are named {twice!r}; names must be unique"
            )
        first: dict[str, Table] = {}
        for table in self.tables:
            if table.pooled:
                continue
            other = first.setdefault(table.module, table)
            if table.embedding_dim != other.embedding_dim:
                raise ConfigError(
                    f"the sequence tables {other.name!r} and {table.name!r} of module "
                    f"{table.module!r} have {other.embedding_dim} and {table.embedding_dim} "
                    "columns; TorchRec's EmbeddingCollection takes tables of one width: give them "
                    "modules of their own (tables[].module)"
                )

    def __repr__(self) -> str:
        ranks, dims = self.topology, [table.embedding_dim for table in self.tables]
        profiled = sum(table.reuse_histogram is not None for table in self.tables)
        return (
            f"ShardingTask: {len(self.tables)} tables of {self.table_bytes / GIB:.2f} GiB, "
            f"{min(dims)} to {max(dims)} columns, {profiled} with an access profile\n"
            f"  {ranks.world_size} {ranks.compute_device} ranks, {ranks.ranks_per_host} a host, "
            f"with {ranks.rank_memory_text} each\n"
            f"  batch size {self.batch_size:,}"
        )

    def with_values(self, **fields: Mapping[str, Any]) -> ShardingTask:
        """Return the task with other values of fields of some tables, by the tables' names."""

        def changed(table: Table) -> Table:
            name = table.name
            values = {key: by_name[name] for key, by_name in fields.items() if name in by_name}
            return dataclasses.replace(table, **values) if values else table

        return dataclasses.replace(self, tables=tuple(map(changed, self.tables)))

    @property
    def table_bytes(self) -> int:
        """Memory of all tables, each as one shard."""
        return sum(self.topology.table_bytes(table) for table in self.tables)

    @property
    def known_optimizer(self) -> str | None:
        """The optimizer that is stated, or else the one whose state the topology counts.

        It is None if the topology counts the state of no known optimizer, or of several.
        """
        if self.optimizer is not None or self.topology.optimizer_bytes_by_table:
            return self.optimizer
        counted = (self.topology.bytes_per_element, self.topology.optimizer_bytes_per_row)
        return next((name for name in STATE_BYTES if memory_of(name) == counted), None)

    @property
    def can_replicate(self) -> bool:
        """Return whether the optimizer trains replicas; an unknown one is assumed to."""
        return self.known_optimizer is None or self.known_optimizer in CAN_REPLICATE

    def to_json(self) -> dict[str, Any]:
        """Return the form of task.json."""
        fields: dict[str, Any] = {
            "tables": [form_of(table) for table in self.tables],
            "topology": self.topology.to_json(),
            "batch_size": self.batch_size,
        }
        if self.optimizer is not None:
            fields["optimizer"] = self.optimizer
        if not self.exchange_precision.is_exact:
            fields["exchange_precision"] = self.exchange_precision.to_json()
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], *, name: str = "the task") -> ShardingTask:
        """Read the form of task.json.

        Args:
            name: what to call the task in messages.

        Raises:
            ConfigError: a key is missing, unknown, or has a value of the wrong kind.
        """
        optimizer, topology = fields.get("optimizer"), fields.get("topology")
        if optimizer in list(STATE_BYTES) and isinstance(topology, Mapping):
            counted = zip(OPTIMIZER_KEYS, memory_of(optimizer), strict=True)
            fields = {**fields, "topology": {**dict(counted), **topology}}
        return read_form(fields, cls, name=name, error=ConfigError)

    def _check_optimizer(self, optimizer: str) -> None:
        check_choice("the task's optimizer", optimizer, STATE_BYTES)
        for key, num_bytes in zip(OPTIMIZER_KEYS, memory_of(optimizer), strict=True):
            if (counted := getattr(self.topology, key)) != num_bytes:
                raise ConfigError(
                    f"the task's optimizer is {optimizer!r}, and topology.{key} is {counted}; it "
                    f"must be {num_bytes}; correct one of the two, or leave topology.{key} out"
                )
        if reason := why_not_fused(optimizer, self.topology.compute_device):
            raise ConfigError(f"the task's optimizer is {reason}")


def with_optimizer(task: ShardingTask, optimizer: str) -> ShardingTask:
    """Return the task with another optimizer of the tables, whose state counts as memory."""
    per_element, per_row = memory_of(optimizer)
    topology = dataclasses.replace(
        task.topology,
        bytes_per_element=per_element,
        optimizer_bytes_per_row=per_row,
        optimizer_bytes_by_table={},
    )
    return dataclasses.replace(task, topology=topology, optimizer=optimizer)


def in_half(task: ShardingTask) -> ShardingTask:
    """Return the task with all tables in fp16."""
    return task.with_values(precision=dict.fromkeys((t.name for t in task.tables), "fp16"))


def without_memory_limit(task: ShardingTask) -> ShardingTask:
    """Return the task on ranks whose memory holds any table."""
    topology = dataclasses.replace(task.topology, memory_bytes=MAX_BYTES, memory_bytes_by_rank=None)
    return dataclasses.replace(task, topology=topology)


def read_task(path: str | Path) -> ShardingTask:
    """Read a task.json.

    Raises:
        ConfigError: the file is missing, is not JSON, or does not describe a task.
    """
    fields = read_json_object(path, noun="task")
    return ShardingTask.from_json(fields, name=f"the task file {path}")
