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

from dlrm_sharded.cost.learned import with_profiles
from dlrm_sharded.data.task_sets import PARTS, papers_tables
from dlrm_sharded.errors import ConfigError, check_count, check_number
from dlrm_sharded.rl.inputs import Inputs, describe
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask, Topology, read_task


@dataclass(frozen=True)
class TaskPool:
    """Tasks of tables drawn from a pool, with replacement, on equal ranks.

    Args:
        tables: with a reuse histogram.
        full: least and most share of all memory that the tables take.
        largest: no table takes more than this share of a rank's memory.
    """

    tables: tuple[Table, ...]
    num_tables: int
    world_size: int
    batch_size: int
    full: tuple[float, float] = (0.6, 0.9)
    largest: float = 0.75

    def __post_init__(self) -> None:
        check_count("tasks.num_tables", self.num_tables, least=1)
        check_count("tasks.world_size", self.world_size, least=1)
        check_number("tasks.largest", self.largest, above=True, most=1.0)
        check_number("tasks.full", self.full[1], above=True, most=1.0)
        if not 0 < self.full[0] <= self.full[1]:
            raise ConfigError(f"tasks.full is {list(self.full)}, must be two rising shares")
        if not self.tables:
            raise ConfigError("there are no tables to draw tasks from")

    @cached_property
    def described(self) -> tuple[Tensor, Tensor]:
        """Features [N, F] and work [N, M] of all tables."""
        return describe(self.tables, self.batch_size)

    @cached_property
    def _size_bytes(self) -> NDArray[np.int64]:
        topology = Topology(1, 1)
        return np.array([topology.table_bytes(table) for table in self.tables])

    @property
    def rank_bytes(self) -> int:
        """Twice what the tables of a rank take in the mean."""
        return int(2 * self._size_bytes.mean() * self.num_tables / self.world_size)

    def mixed(self, other: TaskPool, share: float) -> TaskPool:
        """Tasks of which such a share of the tables is drawn from the other pool."""
        num = min(len(self.tables), len(other.tables))
        of_other = round(share * num)
        tables = self.tables[: num - of_other] + other.tables[:of_other]
        return dataclasses.replace(self, tables=tables)

    def draw(self, rng: np.random.Generator) -> DrawnTask:
        tables = rng.integers(len(self.tables), size=self.num_tables)
        sizes = self._size_bytes[tables]
        memory_bytes = sizes.sum() / (rng.uniform(*self.full) * self.world_size)
        return DrawnTask(tables, int(max(memory_bytes, sizes.max() / self.largest)) + 1)

    def task(self, drawn: DrawnTask) -> ShardingTask:
        tables = tuple(
            dataclasses.replace(self.tables[j], name=f"{self.tables[j].name}_{i:03d}")
            for i, j in enumerate(drawn.tables)
        )
        topology = Topology(self.world_size, drawn.memory_bytes)
        return ShardingTask(tables, topology, self.batch_size)

    def inputs(self, drawn: Sequence[DrawnTask]) -> Inputs:
        """The same as of their tasks."""
        tables = np.stack([each.tables for each in drawn])
        features, work = self.described
        memory = torch.tensor([each.memory_bytes for each in drawn])
        return Inputs(
            features=features[tables],
            work=work[tables],
            size_bytes=torch.from_numpy(self._size_bytes[tables]),
            capacity=memory[:, None].expand(-1, self.world_size).contiguous(),
        )


@dataclass(frozen=True, slots=True)
class DrawnTask:
    """Places of a task's tables [T] in the pool, and the memory of each rank."""

    tables: NDArray[np.int64]
    memory_bytes: int


def training_tasks(
    *,
    task: str | None = None,
    num_tables: int = 50,
    world_size: int = 4,
    batch_size: int = 4096,
    full: Sequence[float] = (0.3, 0.7),
    largest: float = 0.5,
    part: str = "training",
) -> TaskPool:
    """Tasks to train on.

    Args:
        task: a task.json, of whose tables they are; None: half of the papers' tables
            (`task_sets.papers_tables`), of which the other half is unseen.
        part: which half.
    """
    check_count("tasks.batch_size", batch_size, least=1)
    if not isinstance(full, Sequence) or len(full) != 2:
        raise ConfigError(f"tasks.full is {full}, must be two rising shares")
    for share in full:
        check_number("a share in tasks.full", share, above=True, most=1.0)
    if part not in PARTS:
        raise ConfigError(f"tasks.part is {part!r}; known: {', '.join(PARTS)}")
    if task is None:
        tables = papers_tables(part)
    else:
        of_task = read_task(task)
        tables = of_task.tables
        if of_task.batch_size != batch_size:
            # what ids a batch uses again, and how often, was measured at another size
            tables = tuple(dataclasses.replace(t, reuse_histogram=None) for t in tables)
    topology = Topology(world_size, memory_bytes=1)
    profiled = with_profiles(ShardingTask(tables, topology, batch_size)).tables
    return TaskPool(profiled, num_tables, world_size, batch_size, (full[0], full[1]), largest)
