"""Random tasks to train policies on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_sharded.datasets.table_kinds import PARTS, TABLES
from dlrm_sharded.errors import ConfigError, check_count, check_number
from dlrm_sharded.profiles import with_profiles
from dlrm_sharded.rl.inputs import Inputs, describe
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology, read_task


@dataclass(frozen=True)
class TableSet:
    """Tables to draw from.

    Args:
        tables: with the reuse histograms of the batch size.
    """

    tables: tuple[Table, ...]
    batch_size: int

    def __post_init__(self) -> None:
        if not self.tables:
            raise ConfigError("there are no tables to draw tasks from")

    @classmethod
    def profiled(cls, tables: Sequence[Table], batch_size: int) -> TableSet:
        """Tables with the histograms they have, or else assumed ones."""
        task = ShardingTask(tuple(tables), Topology(world_size=1, memory_bytes=1), batch_size)
        return cls(with_profiles(task).tables, batch_size)

    @cached_property
    def described(self) -> tuple[Tensor, Tensor]:
        """Features [N, F] and work [N, M] of all tables."""
        return describe(self.tables, self.batch_size)

    @cached_property
    def size_bytes(self) -> NDArray[np.int64]:
        topology = Topology(1, 1)
        return np.array([topology.table_bytes(table) for table in self.tables])


@dataclass(frozen=True)
class TaskPool:
    """Tasks on equal ranks, each of tables of one set, drawn with replacement.

    Args:
        full: least and most share of all memory that the tables take.
        largest: no table takes more than this share of a rank's memory.
    """

    sets: tuple[TableSet, ...]
    num_tables: int
    world_size: int
    full: tuple[float, float] = (0.6, 0.9)
    largest: float = 0.75

    def __post_init__(self) -> None:
        check_count("tasks.num_tables", self.num_tables, least=1)
        check_count("tasks.world_size", self.world_size, least=1)
        check_number("tasks.largest", self.largest, above=True, most=1.0)
        check_number("tasks.full", self.full[1], above=True, most=1.0)
        if not 0 < self.full[0] <= self.full[1]:
            raise ConfigError(f"tasks.full is {list(self.full)}, must be two rising shares")
        if not self.sets:
            raise ConfigError("there are no sets of tables to draw tasks from")

    @cached_property
    def described(self) -> tuple[Tensor, Tensor]:
        """Features [N, F] and work [N, M] of all tables of all sets."""
        features, work = zip(*(each.described for each in self.sets), strict=True)
        return torch.cat(features), torch.cat(work)

    @property
    def rank_bytes(self) -> int:
        """Twice what the tables of a rank take in the mean."""
        mean = max(each.size_bytes.mean() for each in self.sets)
        return int(2 * mean * self.num_tables / self.world_size)

    def mixed(self, other: TaskPool, share: float) -> TaskPool:
        """Tasks of which such a share of the tables is drawn from the other pool's sets."""
        sets = []
        for mine, others in zip(self.sets, other.sets, strict=True):
            num = min(len(mine.tables), len(others.tables))
            of_other = round(share * num)
            tables = mine.tables[: num - of_other] + others.tables[:of_other]
            sets.append(dataclasses.replace(mine, tables=tables))
        return dataclasses.replace(self, sets=tuple(sets))

    def draw(self, rng: np.random.Generator) -> DrawnTask:
        chosen = int(rng.integers(len(self.sets)))
        of = self.sets[chosen]
        tables = rng.integers(len(of.tables), size=self.num_tables)
        sizes = of.size_bytes[tables]
        memory_bytes = sizes.sum() / (rng.uniform(*self.full) * self.world_size)
        return DrawnTask(chosen, tables, int(max(memory_bytes, sizes.max() / self.largest)) + 1)

    def task(self, drawn: DrawnTask) -> ShardingTask:
        of = self.sets[drawn.of_set]
        tables = tuple(
            dataclasses.replace(of.tables[j], name=f"{of.tables[j].name}_{i:03d}")
            for i, j in enumerate(drawn.tables)
        )
        return ShardingTask(tables, Topology(self.world_size, drawn.memory_bytes), of.batch_size)

    def inputs(self, drawn: Sequence[DrawnTask]) -> Inputs:
        """The same as of their tasks."""
        sets = [self.sets[each.of_set] for each in drawn]
        memory = torch.tensor([each.memory_bytes for each in drawn])
        features, work = zip(
            *(
                [tensor[each.tables] for tensor in of.described]
                for of, each in zip(sets, drawn, strict=True)
            ),
            strict=True,
        )
        sizes = [of.size_bytes[each.tables] for of, each in zip(sets, drawn, strict=True)]
        return Inputs(
            features=torch.stack(features),
            work=torch.stack(work),
            size_bytes=torch.from_numpy(np.stack(sizes)),
            capacity=memory[:, None].expand(-1, self.world_size).contiguous(),
        )


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """Places of a task's tables [T] in one of the pool's sets, and the memory of each rank."""

    of_set: int
    tables: NDArray[np.int64]
    memory_bytes: int


def training_tasks(
    *,
    tables: Sequence[str] = tuple(TABLES),
    part: str = "training",
    num_tables: int = 50,
    world_size: int = 4,
    batch_sizes: Sequence[int] = (512, 2048, 8192),
    full: Sequence[float] = (0.3, 0.7),
    largest: float = 0.5,
) -> TaskPool:
    """Tasks to train on; each has tables of one kind, at one batch size.

    Args:
        tables: kinds, of `table_kinds.TABLES`, or files that end in .json: tasks, of whose tables
            they are.
        part: which half of a kind's tables; the other half is unseen.
        batch_sizes: global.
    """
    check_count("tasks.world_size", world_size, least=1)
    for key, chosen in (("tables", tables), ("batch_sizes", batch_sizes)):
        if isinstance(chosen, str) or not isinstance(chosen, Sequence) or not chosen:
            raise ConfigError(f"tasks.{key} is {chosen!r}, must be a list that is not empty")
    for batch_size in batch_sizes:
        check_count("a size in tasks.batch_sizes", batch_size, least=1)
    if not isinstance(full, Sequence) or len(full) != 2:
        raise ConfigError(f"tasks.full is {full}, must be two rising shares")
    for share in full:
        check_number("a share in tasks.full", share, above=True, most=1.0)
    if part not in PARTS:
        raise ConfigError(f"tasks.part is {part!r}; known: {', '.join(PARTS)}")
    sets = [_table_set(name, part, batch_size) for name in tables for batch_size in batch_sizes]
    return TaskPool(tuple(sets), num_tables, world_size, (full[0], full[1]), largest)


def _table_set(name: str, part: str, batch_size: int) -> TableSet:
    if name in TABLES:
        return TableSet.profiled(TABLES[name](part), batch_size)
    if not str(name).endswith(".json"):
        known = ", ".join(TABLES)
        raise ConfigError(f"a kind in tasks.tables is {name!r}; known: {known}, and json files")
    task = read_task(name)
    if task.batch_size == batch_size:
        return TableSet.profiled(task.tables, batch_size)
    # what ids a batch uses again, and how often, was measured at another size
    unmeasured = [dataclasses.replace(table, reuse_histogram=None) for table in task.tables]
    return TableSet.profiled(unmeasured, batch_size)
