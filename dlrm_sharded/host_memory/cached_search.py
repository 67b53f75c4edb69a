"""Plans tables beyond the memory of all ranks: some lie in host memory, and devices cache rows.

The load factors are chosen first (`cache_choice.py`), then the search places the tables by what is
left of them on the devices, with the time that caching adds as a part of each piece's load.

Letters: U units, N shapes of all units, L loads; see `search/problem.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.workload import Floats, workload_of_rows
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.host_memory.cache_choice import (
    CacheChoice,
    cache_options,
    choose_caches,
    least_host_bytes,
)
from dlrm_sharded.host_memory.cache_prices import CachePrices, miss_ratios
from dlrm_sharded.plans.cached_memory import cached_shard_bytes
from dlrm_sharded.plans.layouts import block_height
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.plans.task_keys import HOST_MEMORY_KEYS
from dlrm_sharded.search.feasibility import why_none_found
from dlrm_sharded.search.problem import Blocks, Demand, Problem
from dlrm_sharded.search.state import State

CACHE_TABLES = ("auto", "never")
"""Values of the option `cache_tables`: where no other plan fits GPUs, or not at all."""

HOW_TO_ASK = "with sharder.cache_tables=auto, which no GPU has measured yet: "

FILLS = (0.99, 0.96, 0.92, 0.85, 0.75)
"""Shares of the ranks' memory that are tried; a fuller choice leaves less room to place tables."""

GPU_BYTES = 56 * GIB
"""Memory that a rank has for tables on a GPU of 80 GB (conf/topology), assumed for CPU ranks."""


@dataclass(frozen=True, slots=True)
class CachedState:
    """A state of the search, and the load factors of the cached tables."""

    state: State
    load_factors: dict[str, float]


def find_cached_state(
    problem: Problem, search: Callable[[Problem], State | None], *, is_asked: bool, can_cache: bool
) -> CachedState:
    """Choose load factors and place the tables of a task that has no other plan.

    Args:
        search: returns the best state of a problem, or None if it finds none that fits.
        is_asked: whether tables may be cached.
        can_cache: whether they could be, if they may.

    Raises:
        InfeasibleTaskError: there is none; the message says where one would fit.
    """
    if is_asked and can_cache and (found := _find(problem, search)) is not None:
        return found
    reason, elsewhere = why_none_found(problem), None
    if can_cache and problem.task.table_bytes > problem.capacity_bytes.sum():
        elsewhere = where_caching_fits(problem, "" if is_asked else HOW_TO_ASK)
    raise InfeasibleTaskError(reason if elsewhere is None else f"{reason}; {elsewhere}")


def _find(problem: Problem, search: Callable[[Problem], State | None]) -> CachedState | None:
    """Return the tables placed at the first fill that works; None if there is none."""
    task, topology = problem.task, problem.task.topology
    if topology.compute_device != "cuda":
        return None
    options = cache_options(task, CachePrices.of(topology, problem.priced.standing))
    for fill in FILLS:
        choice = choose_caches(
            options,
            device_bytes=int(fill * problem.capacity_bytes.sum()),
            host_bytes=_host_limit(task, fill),
        )
        if choice is None:
            return None
        load_factors = _by_name(task, choice)
        if not load_factors:  # all tables would fit, if they could be placed
            continue
        state = search(cached_problem(problem, load_factors))
        if state is not None:
            return CachedState(state, load_factors)
    return None


def cached_problem(problem: Problem, load_factors: Mapping[str, float]) -> Problem:
    """Return the problem in which some tables are cached: pieces are smaller and take longer."""
    if not load_factors:
        return problem
    cached = _CachedPieces(problem, load_factors)
    size, added_ms = problem.size_bytes.copy(), np.zeros(len(problem.size_bytes))
    for unit in cached.units():
        for shape in range(problem.first_shape[unit], problem.first_shape[unit + 1]):
            steps = shape - int(problem.first_shape[unit]) + 1
            size[shape], added_ms[shape] = cached.of_columns(unit, steps)
    load, demand = _with_added(problem, problem, added_ms)
    return dataclasses.replace(
        problem,
        size_bytes=size,
        load=load,
        demand=demand,
        blocks=tuple(_cached_blocks(problem, blocks, cached) for blocks in problem.blocks),
    )


def where_caching_fits(problem: Problem, how: str = "") -> str | None:
    """Say, of a task without a plan, where one with cached tables would fit; None if nowhere.

    Args:
        how: how to ask for such a plan.
    """
    task, topology = problem.task, problem.task.topology
    device_bytes, where = int(problem.capacity_bytes.sum()), "with "
    if topology.compute_device != "cuda":
        device_bytes, where = GPU_BYTES * topology.world_size, "on cuda, with "
        if task.table_bytes <= FILLS[0] * device_bytes:
            return f"they fit on cuda with {GPU_BYTES / GIB:.0f} GiB a rank"
    options = cache_options(task, CachePrices.of(topology, problem.priced.standing))
    choice = choose_caches(options, device_bytes=int(FILLS[0] * device_bytes), host_bytes=None)
    if choice is None or not choice.load_factors:
        return None
    ranks, factors = topology.world_size, choice.load_factors
    text = (
        f"{how}{where}{device_bytes / ranks / GIB:.0f} GiB a rank for tables and "
        f"{choice.host_bytes / ranks / GIB:.0f} GiB of host memory a rank, a plan with "
        f"{len(factors)} cached tables fits, load factors {min(factors):.2g} to "
        f"{max(factors):.2g}; caching adds about {choice.added_ms / ranks:.1f} ms to a step"
    )
    limit = _host_limit(task, 1.0)
    if topology.compute_device == "cuda" and limit is not None and choice.host_bytes > limit:
        least = least_host_bytes(options, device_bytes=int(FILLS[0] * device_bytes)) or 0
        text += (
            f"; host memory is limited to {limit / ranks / GIB:.0f} GiB a rank, and no choice "
            f"with less than {least / ranks / GIB:.0f} was found ({HOST_MEMORY_KEYS})"
        )
    return text


class _CachedPieces:
    """Sizes and times of the pieces of cached tables."""

    def __init__(self, problem: Problem, load_factors: Mapping[str, float]) -> None:
        self._problem = problem
        self._load_factors = load_factors
        self._prices = CachePrices.of(problem.task.topology, problem.priced.standing)
        self._miss_ratio = miss_ratios(problem.task, load_factors)

    def units(self) -> list[int]:
        """Return the units that have a cached table."""
        tables = self._problem.task.tables
        return [
            unit
            for unit, places in enumerate(self._problem.tables)
            if any(tables[place].name in self._load_factors for place in places)
        ]

    def of_columns(self, unit: int, steps: int) -> tuple[int, float]:
        """Return the bytes, and the time that caching adds, of columns of all rows of a unit."""
        size_bytes, added_ms = 0, 0.0
        step = int(self._problem.columns_per_step[unit])
        for place in self._problem.tables[unit]:
            table = self._problem.task.tables[place]
            cols = min(steps * step, table.embedding_dim) if step else table.embedding_dim
            size, ms = self.of(table, table.num_embeddings, cols)
            size_bytes, added_ms = size_bytes + size, added_ms + ms
        return size_bytes, added_ms

    def of(self, table: Table, rows: int, cols: int) -> tuple[int, float]:
        """Return the bytes of a piece of a table on the device, and the time that caching adds."""
        task = self._problem.task
        load_factor = self._load_factors.get(table.name)
        if load_factor is None:
            return task.topology.shard_bytes(table.name, rows, cols), 0.0
        num_ids = task.batch_size * table.pooling_factor * rows / table.num_embeddings
        shard = (0, 1, rows, cols, num_ids)
        workload = workload_of_rows(1, 1, task.batch_size, [shard], [table.reuse_histogram or ()])
        added_ms = self._prices.added_ms(workload, np.array([self._miss_ratio[table.name]]))
        return cached_shard_bytes(task.topology, rows, cols, load_factor), float(added_ms[0])


def _cached_blocks(problem: Problem, blocks: Blocks, cached: _CachedPieces) -> Blocks:
    size, added_ms = blocks.size_bytes.copy(), np.zeros(len(blocks.size_bytes))
    if blocks.is_replica:  # replicas have a kernel of their own, without a cache
        possible = blocks.possible.copy()
        possible[cached.units()] = False
        return dataclasses.replace(blocks, possible=possible)
    for unit in cached.units():
        if not blocks.possible[unit]:
            continue
        table = problem.task.tables[problem.tables[unit][0]]
        height = block_height(table.num_embeddings, blocks.group_size)
        last_height = table.num_embeddings - height * (blocks.group_size - 1)
        size[unit], added_ms[unit] = cached.of(table, height, table.embedding_dim)
        size[unit, -1] = cached.of(table, last_height, table.embedding_dim)[0]
    load, demand = _with_added(problem, blocks, added_ms)
    return dataclasses.replace(blocks, size_bytes=size, load=load, demand=demand)


def _with_added(
    problem: Problem, priced: Problem | Blocks, added_ms: Floats
) -> tuple[Floats, Floats]:
    """Return loads [n, L] and demands of pieces with time [n] that adds to the forward pass."""
    compute_ms = np.column_stack([added_ms, np.zeros_like(added_ms)])
    added = problem.weights.loads(compute_ms, np.zeros_like(added_ms))
    demand = priced.demand.copy()
    demand[:, Demand.SURCHARGE] += added
    return priced.load + added, demand


def _by_name(task: ShardingTask, choice: CacheChoice) -> dict[str, float]:
    return {
        table.name: option.load_factor
        for table, option in zip(task.tables, choice.options, strict=True)
        if option.load_factor is not None
    }


def _host_limit(task: ShardingTask, fill: float) -> int | None:
    """Return the host memory of all ranks that may be used; with several hosts, not quite all."""
    topology = task.topology
    if topology.host_memory_bytes is None:
        return None
    is_shared = topology.ranks_per_host == topology.world_size
    return int((1.0 if is_shared else fill) * topology.host_memory_bytes * topology.world_size)
