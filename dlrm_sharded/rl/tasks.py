"""Random tasks on which policies are trained.

Letters: E episodes, N tables of all sets, T tables of a task, F features, M terms of work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_sharded.accesses.patterns import AccessPattern
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.datasets.table_kinds import HALVES, TABLE_KINDS, drawn_accesses
from dlrm_sharded.files.errors import ConfigError, check_count, check_flag, check_number
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology, read_task
from dlrm_sharded.rl.task_tensors import TaskTensors, table_tensors


@dataclass(frozen=True, slots=True)
class TableSet:
    """Tables to draw tasks from, with their reuse histograms at one batch size.

    Args:
        accesses: access patterns by table; without a pattern, histograms are measured or assumed.
    """

    tables: tuple[Table, ...]
    batch_size: int
    accesses: Mapping[str, AccessPattern]

    @classmethod
    def from_tables(
        cls,
        tables: Sequence[Table],
        batch_size: int,
        accesses: Mapping[str, AccessPattern] = MappingProxyType({}),
    ) -> TableSet:
        """Build a set, with assumed reuse histograms for tables that have none and no pattern."""
        if not tables:
            raise ConfigError("there are no tables to draw tasks from")
        task = ShardingTask(tuple(tables), Topology(world_size=1, memory_bytes=1), batch_size)
        histograms = {}
        for table in tables:
            if pattern := accesses.get(table.name):
                num_ids = batch_size * table.pooling_factor
                distribution = pattern.distribution(table.num_embeddings, num_ids)
                histograms[table.name] = distribution.expected_reuse_histogram(num_ids)
        task = with_profiles(task.with_values(reuse_histogram=histograms))
        return cls(task.tables, batch_size, accesses)


class DrawnTask(NamedTuple):
    """A task as indices into a pool.

    Attributes:
        set_index: index of the set in the pool.
        tables: indices of the tables in the set; a table may be drawn several times.
        memory_bytes: memory of each rank.
    """

    set_index: int
    tables: list[int]
    memory_bytes: int


@dataclass(frozen=True)
class TaskPool:
    """Tasks on equal ranks; the tables of a task are drawn from one set, with replacement.

    Args:
        full: smallest and largest share of all memory that a task's tables take.
        largest: no table takes more than this share of a rank's memory.
        few_widths: share of the tasks whose tables have only one or two widths of their set.
    """

    sets: tuple[TableSet, ...]
    num_tables: int
    world_size: int
    full: tuple[float, float]
    largest: float
    few_widths: float

    @cached_property
    def table_tensors(self) -> tuple[Tensor, Tensor]:
        """Features [N, F] and work [N, M] of the tables of all sets."""
        tensors = [table_tensors(one.tables, one.batch_size) for one in self.sets]
        features, work = zip(*tensors, strict=True)
        return torch.cat(features), torch.cat(work)

    @cached_property
    def _size_bytes(self) -> list[NDArray[np.int64]]:
        """Bytes of the tables of each set."""
        size = Topology(world_size=1, memory_bytes=1).table_bytes
        return [np.array([size(table) for table in one.tables]) for one in self.sets]

    def accesses(self, task: ShardingTask) -> dict[str, AccessPattern]:
        """Return the patterns of the tables of a task that was drawn from the pool, by name."""
        known = {name: pattern for one in self.sets for name, pattern in one.accesses.items()}
        in_pool = {table.name: table.name.rpartition("_")[0] for table in task.tables}
        return {name: known[found] for name, found in in_pool.items() if found in known}

    @property
    def rank_bytes(self) -> int:
        """Twice the mean size of the tables on one rank."""
        mean = max(sizes.mean() for sizes in self._size_bytes)
        return int(2 * mean * self.num_tables / self.world_size)

    def draw(self, rng: np.random.Generator) -> DrawnTask:
        set_index = int(rng.integers(len(self.sets)))
        in_set = self.sets[set_index].tables
        tables = rng.integers(len(in_set), size=self.num_tables)
        if rng.random() < self.few_widths:
            widths = np.array([table.embedding_dim for table in in_set])
            chosen = widths[tables[: rng.integers(1, 3)]]
            tables = rng.choice(np.isin(widths, chosen).nonzero()[0], self.num_tables)
        sizes = self._size_bytes[set_index][tables]
        memory_bytes = sizes.sum() / (rng.uniform(*self.full) * self.world_size)
        memory_bytes = max(memory_bytes, sizes.max() / self.largest)
        return DrawnTask(set_index, tables.tolist(), int(memory_bytes) + 1)

    def task(self, drawn: DrawnTask) -> ShardingTask:
        table_set = self.sets[drawn.set_index]
        # the same table may be drawn twice, so its number in the task makes its name unique
        tables = tuple(
            dataclasses.replace(table_set.tables[j], name=f"{table_set.tables[j].name}_{i:03d}")
            for i, j in enumerate(drawn.tables)
        )
        topology = Topology(self.world_size, drawn.memory_bytes)
        return ShardingTask(tables, topology, table_set.batch_size)

    def tensors(self, drawn: Sequence[DrawnTask]) -> TaskTensors:
        """Return what `TaskTensors.from_tasks` gives for these tasks, without building them."""
        first = np.cumsum([0, *map(len, self._size_bytes)])
        tables = [first[task.set_index] + np.array(task.tables) for task in drawn]
        in_pool = torch.from_numpy(np.stack(tables))
        features, work = self.table_tensors
        memory_bytes = torch.tensor([task.memory_bytes for task in drawn])
        return TaskTensors(
            features=features[in_pool],
            work=work[in_pool],
            size_bytes=torch.from_numpy(np.concatenate(self._size_bytes))[in_pool],
            capacity=memory_bytes[:, None].expand(-1, self.world_size).contiguous(),
        )


def training_tasks(
    *,
    tables: Sequence[str],
    num_tables: int,
    world_size: int,
    batch_sizes: Sequence[int],
    full: Sequence[float],
    largest: float,
    few_widths: float,
    varied_accesses: bool,
    part: str = "training",
) -> TaskPool:
    """Return the pool to train on, with one set of tables for each kind and batch size.

    The values of a training are in conf/train_policy.yaml.

    Args:
        tables: names of `table_kinds.TABLE_KINDS`, or paths of tasks (*.json) whose tables to use.
        batch_sizes: global batch sizes.
        full, largest, few_widths: see `TaskPool`.
        varied_accesses: whether half of a kind's tables have drawn access patterns, see
            `drawn_accesses`; the histograms of the others are assumed.
        part: which half of a kind's tables to use, see `table_kinds.HALVES`.

    Raises:
        ConfigError: an argument cannot be used.
    """
    check_count("tasks.num_tables", num_tables, least=1)
    check_count("tasks.world_size", world_size, least=1)
    for key, chosen in (("tables", tables), ("batch_sizes", batch_sizes), ("full", full)):
        if isinstance(chosen, str) or not isinstance(chosen, Sequence) or not chosen:
            raise ConfigError(f"tasks.{key} is {chosen!r}; it must be a list that is not empty")
    for batch_size in batch_sizes:
        check_count("a size in tasks.batch_sizes", batch_size, least=1)
    for share in full:
        check_number("a share in tasks.full", share, above=True, most=1.0)
    if len(full) != 2 or full[0] > full[1]:
        raise ConfigError(f"tasks.full is {full}; it must be two rising shares")
    check_number("tasks.largest", largest, above=True, most=1.0)
    check_number("tasks.few_widths", few_widths, most=1.0)
    check_flag("tasks.varied_accesses", varied_accesses)
    if part not in HALVES:
        raise ConfigError(f"tasks.part is {part!r}; known: {', '.join(HALVES)}")
    sets = [
        _table_set(name, part, batch_size, varied_accesses=varied_accesses)
        for name in tables
        for batch_size in batch_sizes
    ]
    return TaskPool(tuple(sets), num_tables, world_size, (full[0], full[1]), largest, few_widths)


def _table_set(name: str, half: str, batch_size: int, *, varied_accesses: bool) -> TableSet:
    if name in TABLE_KINDS:
        tables = TABLE_KINDS[name](half)
        accesses = drawn_accesses(tables, half) if varied_accesses else {}
        return TableSet.from_tables(tables, batch_size, accesses)
    if not str(name).endswith(".json"):
        known = ", ".join(TABLE_KINDS)
        raise ConfigError(f"a kind in tasks.tables is {name!r}; known: {known}, and json files")
    task = read_task(name)
    if task.batch_size == batch_size:
        return TableSet.from_tables(task.tables, batch_size)
    # a reuse histogram holds only at the batch size at which it was measured
    unmeasured = [dataclasses.replace(table, reuse_histogram=None) for table in task.tables]
    return TableSet.from_tables(unmeasured, batch_size)
