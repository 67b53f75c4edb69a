"""Cheapest plans of small odd tasks, found exactly, beside neuroshard's plans and the lower bound.

No mixed-integer program of our prices is exact on CPUs, where a price rises with all that its rank
reads. So all plans are enumerated, table by table. A part of a plan is dropped with all that it may
become once it costs more than a known plan: by itself, or in the mean over ranks together with the
least work of the tables that are left. Both are certain, as no price falls when a rank gets more
shards (A2 and L2 of docs/notes/lower_bound.md). Ranks with equal memory may exchange their names,
except for those that hold the last, smaller block of tables in row blocks.

Letters: N parts of plans, O options of a table, W ranks, F quantities, V numbers of a shard.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.planners import planner_of
from dlrm_sharded.cost.base import PricedTask, price
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.communication import STEP_EXCHANGES
from dlrm_sharded.cost.features import GROUP_COLUMNS
from dlrm_sharded.cost.workload import Floats, workload_of_plan
from dlrm_sharded.datasets.odd_tasks import MOST_IDS, ROOM, odd_task
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.layouts import ColumnShards, Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import ShardingTask
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "predicted"
SHARDER = "neuroshard,sharder.time_budget_s=null"
DIMS = (4, 8, 16, 24, 32)
HOSTS = ((1, 2), (1, 3), (1, 4), (2, 2), (3, 1))
"""Hosts, and ranks of each."""

MOST_TABLES = 5
MOST_PARTS = 4_000_000
"""Largest number of parts of plans that are priced before a task is given up."""

BLOCK = 20_000
"""Number of parts that are priced at once."""

ROUNDING = 1e-9
OPTIONS = {
    "first": option(0, "seed of the first task"),
    "num": option(100, "number of tasks"),
}


def small_task(seed: int) -> ShardingTask:
    """Return a task like `odd_task`, with few narrow tables of one module on 2 to 4 ranks.

    Args:
        seed: each seed has its own task; some have no plan.
    """
    rng = np.random.default_rng([seed, 0xE8AC7])
    task = odd_task(seed)
    num_hosts, per_host = HOSTS[rng.integers(len(HOSTS))]
    world_size, num_tables = num_hosts * per_host, int(rng.integers(1, MOST_TABLES + 1))
    drawn = (table for i in itertools.count() for table in odd_task(1_000_000 + seed + i).tables)
    local = task.batch_size // task.topology.world_size
    tables = tuple(
        replace(
            table,
            name=f"t{i}",
            embedding_dim=int(rng.choice(DIMS)),
            pooling_factor=min(table.pooling_factor, MOST_IDS / (local * world_size)),
            reuse_histogram=None,
            pooled=True,
            module="",
            num_features=1,
        )
        for i, table in enumerate(itertools.islice(drawn, num_tables))
    )
    per_element, per_row = task.topology.bytes_per_element, task.topology.optimizer_bytes_per_row
    size = sum(t.num_embeddings * (t.embedding_dim * per_element + per_row) for t in tables)
    topology = replace(
        task.topology,
        world_size=world_size,
        local_world_size=per_host,
        memory_bytes=max(1, int(size * rng.choice(ROOM) / world_size)),
        memory_bytes_by_rank=None,
    )
    return ShardingTask(tables, topology, local * world_size, task.optimizer)


class TooManyPlansError(Exception):
    """The plans of a task are too many to enumerate."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Quantities that plans add up from the layouts of their tables, and what they cost.

    The quantities of a rank are its vector [V]; for each group size, replicas aside, the shards and
    the volume that it reduces or exchanges; shards and bytes of replicas; and memory.
    """

    priced: PricedTask
    sizes: tuple[int, ...]

    def of(self, shards: Sequence[Shard], table: Table) -> Floats:
        """Return [W, F], the quantities of a table in one layout."""
        task = self.priced.task
        world_size = task.topology.world_size
        plan, alone = ShardingPlan(world_size, tuple(shards)), replace(task, tables=(table,))
        workload = workload_of_plan(plan, alone)
        exchange = workload.exchange(for_ids=False)
        zeros = np.zeros(world_size)
        columns = [exchange.volume, exchange.num_shards]
        reduces = {reduce.group_size: reduce for reduce in exchange.reduces}
        for size in self.sizes:
            reduce = reduces.get(size)
            columns += [reduce.volume, reduce.num_shards] if reduce else [zeros, zeros]
        in_columns = workload.by_rank((workload.group_size == 1).astype(np.float64))
        replicas = workload.by_rank(workload.is_replica.astype(np.float64))
        memory = zeros.copy()
        for shard in shards:
            memory[shard.rank] += shard.bytes_on(task.topology)
        columns += [in_columns, replicas, zeros + exchange.replica_bytes, memory]
        vectors = workload.by_rank(self.priced.compute.vectors(workload))
        return np.column_stack([vectors, *columns])

    def least_work_ms(self, options: Floats) -> float:
        """Return the least work of all ranks for a table with layouts [O, W, F]."""
        vectors = options[..., : -2 * len(self.sizes) - 6]
        alone_ms = self.priced.compute.stand_alone_ms(vectors.reshape(-1, vectors.shape[-1]))
        return float(alone_ms.reshape(vectors.shape[:2]).sum(axis=1).min())

    def costs_ms(self, sums: Floats) -> Floats:
        """Return [N, W], predicted costs of ranks with sums [N, W, F] of quantities."""
        compute, communication = self.priced.compute, self.priced.communication
        num_exchanged = 2 + 2 * len(self.sizes)
        vectors, rest = sums[..., : -num_exchanged - 4], sums[..., -num_exchanged - 4 :]
        in_columns, replicas, replica_bytes, _ = np.moveaxis(rest[..., num_exchanged:], -1, 0)
        num_lookups = (in_columns > 0) * 1.0 + (replicas > 0)
        for i in range(len(self.sizes)):
            num_lookups += rest[..., 3 + 2 * i] > 0
        flat = vectors.reshape(-1, vectors.shape[-1])
        times_ms = compute.times_ms(flat, num_lookups.ravel()).sum(axis=1).reshape(sums.shape[:2])
        hosts = self.priced.hosts
        for kind in STEP_EXCHANGES:
            times_ms += communication.all_to_all_ms(kind, rest[..., 0], rest[..., 1], hosts)
            for i, size in enumerate(self.sizes):
                volume, shards = rest[..., 2 + 2 * i], rest[..., 3 + 2 * i]
                group = hosts.group(size)
                reduce_ms = communication.reduce_ms(kind, volume.ravel(), shards.ravel(), group)
                times_ms += reduce_ms.reshape(volume.shape)
        if hosts.world_size > 1:
            times_ms += communication.all_reduce_ms(replica_bytes[:, 0], hosts)[:, None]
        return times_ms


def cheapest_ms(priced: PricedTask, known_ms: float = math.inf) -> float:
    """Return the least cost of all valid plans of a task whose tables are narrow; inf without any.

    Args:
        known_ms: cost of some plan, beyond which nothing is looked for.

    Raises:
        TooManyPlansError: they are more than `MOST_PARTS`.
    """
    task, topology = priced.task, priced.task.topology
    # of wider tables on GPUs, several narrow shards may cost a rank less than one
    assert max(table.embedding_dim for table in task.tables) <= GROUP_COLUMNS[0]
    parts = _Parts(priced, tuple(size for size in topology.group_sizes if size > 1))
    choices = []
    for table in task.tables:
        options = np.stack([parts.of(shards, table) for shards in _layouts_of(table, task)])
        choices.append((options, parts.least_work_ms(options)))
    choices.sort(key=lambda choice: -choice[1])
    if len(set(topology.rank_memory_bytes)) == 1:
        choices[0] = (_without_renamed(choices[0][0], topology.ranks_per_host), choices[0][1])
    left_ms = [sum(work for _, work in choices[i + 1 :]) for i in range(len(choices))]
    capacity = np.array(topology.rank_memory_bytes)
    least_ms, num_priced = known_ms, 0

    def extend(sums: Floats, level: int) -> None:
        nonlocal least_ms, num_priced
        options = choices[level][0]
        for first in range(0, len(sums), size := max(1, BLOCK // len(options))):
            some = (sums[first : first + size, None] + options).reshape(-1, *options.shape[1:])
            some = some[(some[..., -1] <= capacity).all(axis=1)]
            num_priced += len(some)
            if num_priced > MOST_PARTS:
                raise TooManyPlansError
            costs_ms = parts.costs_ms(some)
            if level == len(choices) - 1:
                least_ms = min(least_ms, float(costs_ms.max(axis=1).min(initial=math.inf)))
                continue
            mean_ms = costs_ms.mean(axis=1) + left_ms[level] / topology.world_size
            value_ms = np.maximum(costs_ms.max(axis=1), mean_ms)
            order = np.argsort(value_ms, kind="stable")
            order = order[value_ms[order] < least_ms * (1 - ROUNDING)]
            if len(order):
                extend(some[order], level + 1)

    extend(np.zeros((1, *choices[0][0].shape[1:])), 0)
    return least_ms


def _layouts_of(table: Table, task: ShardingTask) -> Iterator[list[Shard]]:
    """Yield the shards of a table in each of its layouts, a column piece at most once on a rank."""
    topology = task.topology
    world_size, num_steps = topology.world_size, table.embedding_dim // COLUMN_MULTIPLE
    for edges in itertools.combinations_with_replacement(range(num_steps + 1), world_size - 1):
        steps = np.diff([0, *edges, num_steps]) * COLUMN_MULTIPLE
        yield ColumnShards.shards(table, [(r, int(w)) for r, w in enumerate(steps) if w])
    for size in topology.group_sizes:
        for start in range(0, world_size, size):
            rows = RowBlocks(range(start, start + size))
            if size > 1 and rows.is_possible(table):
                yield rows.shards(table)
    if world_size > 1 and task.can_replicate:
        yield Replicas(world_size).shards(table)


def _without_renamed(options: Floats, per_host: int) -> Floats:
    """Return the options [O, W, F] that differ in more than the names of ranks and hosts."""
    kept: dict[object, int] = {}
    for i, ranks in enumerate(options.tolist()):
        named = [tuple(rank) for rank in ranks]
        hosts = [named[h : h + per_host] for h in range(0, len(named), per_host)]
        in_order = [(*sorted(host[:-1]), host[-1]) for host in hosts]
        kept.setdefault((*sorted(in_order[:-1]), in_order[-1]), i)
    return options[list(kept.values())]


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for seed in range(options.first, options.first + options.num):
        yield Case(f"{seed}", functools.partial(_rows, seed))


def _rows(seed: int) -> list[Row]:
    quiet()
    task = small_task(seed)
    planner = planner_of(SHARDER, device=task.topology.compute_device)
    priced = price(planner.cost_model, task)
    assert priced is not None
    try:
        found_ms = priced.predict(planner.sharder.shard(priced.task)).cost_ms
    except ShardingError:
        found_ms = math.inf
    row: Row = {"seed": seed, "num_tables": len(task.tables)}
    row |= {"world_size": task.topology.world_size, "device": task.topology.compute_device}
    try:
        least_ms = cheapest_ms(priced, found_ms)
    except TooManyPlansError:
        return [row | {"least_ms": None}]
    bound_ms = lower_bound_ms(priced)
    assert bound_ms <= least_ms * (1 + ROUNDING), f"seed {seed}: bound {bound_ms}, {least_ms}"
    if least_ms == math.inf:
        return [row | {"least_ms": 0.0}]
    return [row | {"least_ms": least_ms, "found_ms": found_ms, "bound_ms": bound_ms}]


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write how far plans are above the cheapest ones, and bounds below; and the worst tasks."""
    solved = [row for row in rows if row["least_ms"]]
    lines = []
    for device in dict.fromkeys(row["device"] for row in rows):
        some = [row for row in solved if row["device"] == device]
        above = 100 * (np.array([row["found_ms"] / row["least_ms"] for row in some]) - 1)
        below = 100 * (1 - np.array([row["bound_ms"] / row["least_ms"] for row in some]))
        if some:
            exact = int((above < 0.05).sum())
            lines.append(
                (device, len(some), exact, above.mean(), above.max(), below.mean(), below.max())
            )
    one = [Column(name, ".2f") for name in ("plan above, %: mean", "worst")]
    one += [Column(name, ".1f") for name in ("bound below, %: mean", "worst")]
    num = f"{len(rows)} tasks, {len(solved)} solved, "
    num += f"{sum(row['least_ms'] is None for row in rows)} with too many plans, "
    num += f"{sum(row['least_ms'] == 0.0 for row in rows)} without any.\n\n"
    text = num + TextTable(("device", "tasks", "cheapest found", *one), lines).markdown()
    worst = sorted(solved, key=lambda row: -row["found_ms"] / row["least_ms"])[:5]
    loose = sorted(solved, key=lambda row: row["bound_ms"] / row["least_ms"])[:5]
    keys = ("seed", "device", "num_tables", "world_size", "found_ms", "least_ms", "bound_ms")
    picked = [[row[key] for key in keys] for row in (*worst, *loose)]
    return (
        f"{text}\n\nThe dearest plans and the lowest bounds:\n\n"
        + TextTable((*keys[:4], *(Column(key, ".4f") for key in keys[4:])), picked).markdown()
    )
