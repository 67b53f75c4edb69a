"""A plan: rectangles of tables on ranks. The narrow waist between sharders and everything else."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_sharded.errors import InvalidPlanError
from dlrm_sharded.json_files import read_json_object
from dlrm_sharded.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.task import GIB, ShardingTask, Topology

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """The rectangle `rows` x `cols` (both half-open) of one table, on one rank."""

    table: str
    rank: int
    rows: Interval
    cols: Interval

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_cols(self) -> int:
        return self.cols[1] - self.cols[0]

    @classmethod
    def whole(cls, table: Table, rank: int) -> Shard:
        return cls(table.name, rank, (0, table.num_embeddings), (0, table.embedding_dim))

    def bytes_on(self, topology: Topology) -> int:
        """Memory of the shard: weights and optimizer state."""
        return topology.shard_bytes(self.num_rows, self.num_cols)

    def __str__(self) -> str:
        return (
            f"{self.table}[{self.rows[0]}:{self.rows[1]}, {self.cols[0]}:{self.cols[1]}]"
            f" on rank {self.rank}"
        )


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The shards of all tables; they tile every table exactly."""

    world_size: int
    shards: tuple[Shard, ...]

    def shards_by_table(self) -> dict[str, list[Shard]]:
        """Shards of each table, by their place in it."""
        grouped: dict[str, list[Shard]] = defaultdict(list)
        for shard in sorted(self.shards, key=lambda s: (s.rows, s.cols, s.rank)):
            grouped[shard.table].append(shard)
        return dict(grouped)

    def bytes_by_rank(self, topology: Topology) -> list[int]:
        """Memory that the plan takes on each rank."""
        used = [0] * self.world_size
        for shard in self.shards:
            used[shard.rank] += shard.bytes_on(topology)
        return used

    def to_json(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "shards": [
                {"table": s.table, "rank": s.rank, "rows": list(s.rows), "cols": list(s.cols)}
                for s in self.shards
            ],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ShardingPlan:
        """Read the plan in the form of plan.json; what a report says of it there is ignored.

        Raises:
            InvalidPlanError: a key is missing or has a value of the wrong kind.
        """
        try:
            return cls(
                world_size=_integer(fields["world_size"]),
                shards=tuple(
                    Shard(
                        table=str(shard["table"]),
                        rank=_integer(shard["rank"]),
                        rows=_interval(shard["rows"]),
                        cols=_interval(shard["cols"]),
                    )
                    for shard in fields["shards"]
                ),
            )
        except KeyError as error:
            raise InvalidPlanError(f"the plan lacks the key {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise InvalidPlanError(f"the plan has not the form of a plan.json: {error}") from error


def read_plan(path: str | Path) -> ShardingPlan:
    """Read a plan.json.

    Raises:
        ConfigError: the file is missing or is not JSON.
        InvalidPlanError: it does not describe a plan.
    """
    return ShardingPlan.from_json(read_json_object(path, what="plan"))


def validate(plan: ShardingPlan, task: ShardingTask) -> None:
    """Refuse a plan that cannot be trained as it stands.

    Raises:
        InvalidPlanError: a wrong world size, table or rank; shards that overlap, leave a gap or
            reach out of their table; columns that are no multiples of 4; splits that TorchRec does
            not train; more memory than a rank has. The message has the numbers.
    """
    topology = task.topology
    if plan.world_size != topology.world_size:
        raise InvalidPlanError(
            f"the plan is for {plan.world_size} ranks, the job has {topology.world_size}; "
            f"start {plan.world_size} ranks or make a new plan"
        )
    shards_by_table = plan.shards_by_table()
    names = {table.name for table in task.tables}
    for unknown in shards_by_table.keys() - names:
        raise InvalidPlanError(
            f"the plan has shards of a table {unknown!r} that the task does not have; "
            "make the plan for these tables"
        )
    for table in task.tables:
        shards = shards_by_table.get(table.name, [])
        if not shards:
            raise InvalidPlanError(f"table {table.name!r} is in no shard; place every table")
        for shard in shards:
            _check_rectangle(shard, table, plan.world_size)
        _check_tiling(shards, table)
        if is_row_wise(shards, table):
            _check_row_blocks(shards, table, topology)
        else:
            _check_widths(shards, table)
    _check_memory(plan, task)


def whole_tables(task: ShardingTask, ranks: Sequence[int]) -> ShardingPlan:
    """Place every table whole, on the rank that is given for it."""
    shards = (Shard.whole(table, rank) for table, rank in zip(task.tables, ranks, strict=True))
    return ShardingPlan(task.topology.world_size, tuple(shards))


def row_blocks(num_embeddings: int, num_blocks: int) -> list[Interval]:
    """The even blocks of rows that TorchRec trains: ceil(rows / blocks) each, the last one less.

    Fewer than `num_blocks` where the rows do not reach the last ones; FBGEMM does not train an
    empty block, so such a table cannot be split over that many ranks.
    """
    height = -(-num_embeddings // num_blocks)
    return [
        (start, min(start + height, num_embeddings)) for start in range(0, num_embeddings, height)
    ]


def is_row_wise(shards: Sequence[Shard], table: Table) -> bool:
    """Whether a table's shards split its rows."""
    return any(shard.num_rows < table.num_embeddings for shard in shards)


def _interval(bounds: Any) -> Interval:
    start, stop = bounds
    return _integer(start), _integer(stop)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _check_rectangle(shard: Shard, table: Table, world_size: int) -> None:
    if not 0 <= shard.rank < world_size:
        raise InvalidPlanError(f"{shard}: the ranks are 0 to {world_size - 1}")
    for axis, (start, stop), size in (
        ("rows", shard.rows, table.num_embeddings),
        ("cols", shard.cols, table.embedding_dim),
    ):
        if not 0 <= start < stop <= size:
            raise InvalidPlanError(
                f"{shard}: {axis} must be a non-empty part of [0, {size}), is [{start}, {stop})"
            )
    if shard.cols[0] % COLUMN_MULTIPLE or shard.cols[1] % COLUMN_MULTIPLE:
        raise InvalidPlanError(f"{shard}: cols must start and end at multiples of 4 (FBGEMM)")


def _check_tiling(shards: Sequence[Shard], table: Table) -> None:
    """Shards do not overlap and their areas sum to the table's: together, an exact tiling."""
    # Sweep over the row bands between all row boundaries; in each, columns must chain up.
    bounds = sorted({0, table.num_embeddings} | {row for s in shards for row in s.rows})
    for start, stop in itertools.pairwise(bounds):
        edge = 0
        band = [s for s in shards if s.rows[0] <= start and s.rows[1] >= stop]
        for shard in sorted(band, key=lambda s: s.cols):
            if shard.cols[0] < edge:
                raise InvalidPlanError(
                    f"table {table.name!r}: rows [{start}, {stop}), "
                    f"cols [{shard.cols[0]}, {min(edge, shard.cols[1])}) are in two shards; "
                    "shards must not overlap"
                )
            if shard.cols[0] > edge:
                break
            edge = shard.cols[1]
        else:
            if edge == table.embedding_dim:
                continue
        gap_end = min((s.cols[0] for s in band if s.cols[0] > edge), default=table.embedding_dim)
        raise InvalidPlanError(
            f"table {table.name!r}: rows [{start}, {stop}), cols [{edge}, {gap_end}) "
            "are in no shard; shards must cover the whole table"
        )


def _check_row_blocks(shards: Sequence[Shard], table: Table, topology: Topology) -> None:
    """TorchRec trains row blocks of even height over all ranks, or over the ranks of one host."""
    if any(shard.num_cols < table.embedding_dim for shard in shards):
        raise InvalidPlanError(
            f"table {table.name!r} is split by rows and by columns; TorchRec trains row blocks "
            "only at the full width"
        )
    placed = sorted((shard.rank, shard.rows) for shard in shards)
    hosts = range(0, topology.world_size, topology.ranks_per_host)
    groups = [range(topology.world_size)]
    groups += [range(first, first + topology.ranks_per_host) for first in hosts]
    for ranks in groups:
        blocks = row_blocks(table.num_embeddings, len(ranks))
        if len(blocks) == len(ranks) and placed == list(zip(ranks, blocks, strict=True)):
            return
    found = ", ".join(f"rank {rank}: [{start}, {stop})" for rank, (start, stop) in placed)
    height = row_blocks(table.num_embeddings, topology.world_size)[0][1]
    raise InvalidPlanError(
        f"table {table.name!r} is split by rows as {found}; TorchRec trains only even blocks of "
        f"{height:,} rows over all {topology.world_size} ranks in rank order, or even blocks over "
        f"the {topology.ranks_per_host} ranks of one host, none of them empty"
    )


def _check_widths(shards: Sequence[Shard], table: Table) -> None:
    """TorchRec takes the column shards of a table on one rank for one block of equal widths."""
    widths: dict[int, set[int]] = defaultdict(set)
    for shard in shards:
        widths[shard.rank].add(shard.num_cols)
    for rank, found in widths.items():
        if len(found) > 1:
            raise InvalidPlanError(
                f"table {table.name!r} has column shards of the widths {sorted(found)} on rank "
                f"{rank}; TorchRec trains several shards of a table on one rank only at equal "
                "width; merge them into one shard"
            )


def _check_memory(plan: ShardingPlan, task: ShardingTask) -> None:
    used_by_rank = plan.bytes_by_rank(task.topology)
    capacities = task.topology.rank_memory_bytes
    for rank, (used, capacity) in enumerate(zip(used_by_rank, capacities, strict=True)):
        if used > capacity:
            on_rank = [shard for shard in plan.shards if shard.rank == rank]
            largest = max(on_rank, key=lambda shard: shard.bytes_on(task.topology))
            raise InvalidPlanError(
                f"rank {rank} would hold {used:,} B of tables ({used / GIB:.2f} GiB), it has "
                f"{capacity:,} B ({capacity / GIB:.2f} GiB); largest there: {largest} with "
                f"{largest.bytes_on(task.topology):,} B; add ranks, raise topology.memory_gib, "
                "or use another sharder"
            )
