"""Chooses which tables to cache and how much of each, before they are placed.

Each table has options: to lie in device memory, or to be cached at one of several load factors. An
option takes memory on devices and on hosts, and time. All ranks count together here.

The options of a table that matter lie on the lower convex hull of time over device memory. Starting
from the least memory, the step along any table's hull that saves the most time for a byte is taken
first. No choice in as much memory takes less time when the steps taken just fill it (the multiple
choice knapsack with divisible steps: Sinha and Zoltners, Operations Research 1979); otherwise the
best choice is better by less than one step saves. What is left over is filled with options off the
hulls. Host memory has a price, the lowest at which the choice keeps the limit (Lagrange).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.workload import workload_of_tables
from dlrm_sharded.host_memory.cache_prices import CachePrices
from dlrm_sharded.host_memory.miss_ratio import curve_of
from dlrm_sharded.plans.cached_memory import CACHE_WAYS, cached_shard_bytes, host_shard_bytes
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask

NUM_LOAD_FACTORS = 32
"""Number of load factors, evenly spaced on a log scale, at which a table may be cached."""

_NUM_BISECTIONS = 40
_NUM_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class CacheOption:
    """A way to keep one table.

    Args:
        load_factor: share of the rows in the caches; None for all of the table in device memory.
        device_bytes, host_bytes: memory on all ranks together.
        added_ms: time that caching adds to a step, as if one rank had the whole table.
    """

    load_factor: float | None
    device_bytes: int
    host_bytes: int
    added_ms: float


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """An option for each table, in the order of the task."""

    options: tuple[CacheOption, ...]

    @property
    def device_bytes(self) -> int:
        return sum(option.device_bytes for option in self.options)

    @property
    def host_bytes(self) -> int:
        return sum(option.host_bytes for option in self.options)

    @property
    def added_ms(self) -> float:
        """Time that caching adds on all ranks together."""
        return sum(option.added_ms for option in self.options)

    @property
    def load_factors(self) -> list[float]:
        """Load factors of the cached tables."""
        return [o.load_factor for o in self.options if o.load_factor is not None]


def cache_options(task: ShardingTask, prices: CachePrices) -> list[list[CacheOption]]:
    """Return the options of each table of a task whose tables all have a reuse histogram.

    A cache holds at least the rows of one batch: in a smaller one, they would not stay for the
    backward pass.
    """
    return [_options_of(table, task, prices) for table in task.tables]


def choose_caches(
    options: Sequence[Sequence[CacheOption]], *, device_bytes: int, host_bytes: int | None
) -> CacheChoice | None:
    """Choose the options of the least time within the memory of all ranks.

    Args:
        host_bytes: limit of host memory; None for no limit.

    Returns:
        The choice, or None if none was found that fits.
    """
    choice = _at_host_price(options, device_bytes, 0.0)
    if choice is None or host_bytes is None or choice.host_bytes <= host_bytes:
        return choice
    low, high = 0.0, 1e-9 * max(choice.added_ms, 1e-3) / choice.host_bytes
    found: CacheChoice | None = None
    for _ in range(_NUM_DOUBLINGS):
        found = _at_host_price(options, device_bytes, high)
        if found is not None and found.host_bytes <= host_bytes:
            break
        low, high = high, 2.0 * high
    else:
        return None
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        other = _at_host_price(options, device_bytes, middle)
        if other is not None and other.host_bytes <= host_bytes:
            high, found = middle, other
        else:
            low = middle
    return found


def least_host_bytes(options: Sequence[Sequence[CacheOption]], *, device_bytes: int) -> int | None:
    """Return about how much host memory a choice needs at the least; None if none fits."""
    choice = _at_host_price(options, device_bytes, 1e9)
    return None if choice is None else choice.host_bytes


def _options_of(table: Table, task: ShardingTask, prices: CachePrices) -> list[CacheOption]:
    topology, rows = task.topology, table.num_embeddings
    in_device = CacheOption(None, topology.table_bytes(table), 0, 0.0)
    workload = workload_of_tables([table], task.batch_size)
    least = max(float(workload.num_unique[0]), CACHE_WAYS) / rows
    if least >= 1.0:
        return [in_device]
    shares = np.geomspace(least, 1.0, NUM_LOAD_FACTORS, endpoint=False).round(6)
    shares = shares[shares >= 1e-6]
    ratios = curve_of(table, task.batch_size).ratios(shares)
    cached = [
        CacheOption(
            load_factor=share,
            device_bytes=cached_shard_bytes(topology, rows, table.embedding_dim, share),
            host_bytes=host_shard_bytes(topology, rows, table.embedding_dim),
            added_ms=float(prices.added_ms(workload, np.array([ratio]))[0]),
        )
        for share, ratio in zip(shares.tolist(), ratios.tolist(), strict=True)
    ]
    return [in_device, *(o for o in cached if o.device_bytes < in_device.device_bytes)]


def _at_host_price(
    options: Sequence[Sequence[CacheOption]], device_bytes: int, host_price: float
) -> CacheChoice | None:
    """Choose along the hulls, with host memory at a price in ms for a byte."""
    hulls = [_hull(of_table, host_price) for of_table in options]
    place = [0] * len(hulls)
    used = sum(hull[0].device_bytes for hull in hulls)
    if used > device_bytes:
        return None
    steps = sorted(
        (-_saving(hull[k], hull[k + 1], host_price), table, k)
        for table, hull in enumerate(hulls)
        for k in range(len(hull) - 1)
    )
    for _, table, k in steps:
        more = hulls[table][k + 1].device_bytes - hulls[table][k].device_bytes
        # A hull is convex, so its steps come in order; after one that did not fit, none is taken.
        if place[table] == k and used + more <= device_bytes:
            place[table] = k + 1
            used += more
    chosen = [hull[at] for hull, at in zip(hulls, place, strict=True)]
    _fill_up(chosen, options, device_bytes - used, host_price)
    return CacheChoice(tuple(chosen))


def _fill_up(
    chosen: list[CacheOption],
    options: Sequence[Sequence[CacheOption]],
    free_bytes: int,
    host_price: float,
) -> None:
    """Replace options while others save time in the memory that is left, the best ones first."""
    while True:
        best_saving, best_table, best = 0.0, 0, None
        for table, (now, of_table) in enumerate(zip(chosen, options, strict=True)):
            for option in of_table:
                saving = _total(now, host_price) - _total(option, host_price)
                fits = option.device_bytes - now.device_bytes <= free_bytes
                if fits and saving > best_saving:
                    best_saving, best_table, best = saving, table, option
        if best is None:
            return
        free_bytes -= best.device_bytes - chosen[best_table].device_bytes
        chosen[best_table] = best


def _hull(options: Sequence[CacheOption], host_price: float) -> list[CacheOption]:
    """Return the options on the lower convex hull of time over device memory, the least first."""
    ordered = sorted(options, key=lambda o: (o.device_bytes, _total(o, host_price)))
    hull: list[CacheOption] = []
    for option in ordered:
        if hull and _total(option, host_price) >= _total(hull[-1], host_price):
            continue  # it takes more memory for nothing
        while len(hull) > 1 and _saving(hull[-2], hull[-1], host_price) <= _saving(
            hull[-1], option, host_price
        ):
            hull.pop()
        hull.append(option)
    return hull


def _total(option: CacheOption, host_price: float) -> float:
    return option.added_ms + host_price * option.host_bytes


def _saving(before: CacheOption, after: CacheOption, host_price: float) -> float:
    """Return the time that a step to a larger option saves for each of its bytes."""
    more = after.device_bytes - before.device_bytes
    return (_total(before, host_price) - _total(after, host_price)) / max(more, 1)
