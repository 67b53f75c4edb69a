"""The choice of caches against all choices of tiny tasks."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.host_memory.cache_choice import (
    CacheOption,
    cache_options,
    choose_caches,
    least_host_bytes,
)
from dlrm_sharded.host_memory.cache_prices import CachePrices
from dlrm_sharded.plans.tables import Table
from tests.unit.made_up import task_of

Options = list[list[CacheOption]]


def choices(options: Options, device_bytes: int, host_bytes: float) -> Iterator[float]:
    """Times of all choices within the memory."""
    for chosen in itertools.product(*options):
        if (
            sum(o.device_bytes for o in chosen) <= device_bytes
            and sum(o.host_bytes for o in chosen) <= host_bytes
        ):
            yield sum(o.added_ms for o in chosen)


def best_ms(options: Options, device_bytes: int, host_bytes: float) -> float:
    return min(choices(options, device_bytes, host_bytes), default=np.inf)


def convex_options(rng: np.random.Generator, num_tables: int, step: int | None = None) -> Options:
    """Tables whose next byte always saves less than the one before; with equal steps or others."""
    options = []
    for _ in range(num_tables):
        steps = np.full(5, step) if step else rng.integers(5, 30, 5)
        slopes = np.sort(rng.uniform(0.1, 5.0, 5))[::-1]
        sizes = 10 + np.concatenate([[0], steps.cumsum()])
        times = (slopes * steps).sum() - np.concatenate([[0.0], (slopes * steps).cumsum()])
        host = int(rng.integers(50, 200))
        options.append(
            [CacheOption(None, int(sizes[-1]), 0, 0.0)]
            + [CacheOption(0.1 * (i + 1), int(sizes[i]), host, float(times[i])) for i in range(5)]
        )
    return options


@pytest.mark.parametrize("seed", range(20))
def test_is_the_best_in_the_memory_that_it_uses(seed: int) -> None:
    options = convex_options(np.random.default_rng(seed), 3, step=10)
    for device_bytes in range(30, 180, 10):
        choice = choose_caches(options, device_bytes=device_bytes, host_bytes=None)
        assert choice.device_bytes <= device_bytes
        assert choice.added_ms == pytest.approx(best_ms(options, device_bytes, np.inf))


@pytest.mark.parametrize("seed", range(20))
def test_is_within_a_step_of_the_best(seed: int) -> None:
    options = convex_options(np.random.default_rng(seed), 3)
    largest_step = max(
        more.added_ms - less.added_ms
        for of_table in options
        for less, more in itertools.pairwise(sorted(of_table, key=lambda o: o.added_ms))
    )
    for device_bytes in range(30, 400, 23):
        choice = choose_caches(options, device_bytes=device_bytes, host_bytes=None)
        best = best_ms(options, device_bytes, np.inf)
        assert best - 1e-9 <= choice.added_ms < best + largest_step


def test_keeps_the_limit_of_host_memory() -> None:
    """A price does not find every choice, but mostly one that is nearly as good as the best."""
    ratios, num_missed = [], 0
    for seed in range(20):
        options = convex_options(np.random.default_rng(seed), 4)
        for device_bytes, host_bytes in itertools.product((120, 200, 300), (100, 250, 400)):
            choice = choose_caches(options, device_bytes=device_bytes, host_bytes=host_bytes)
            best = best_ms(options, device_bytes, host_bytes)
            if choice is None:
                num_missed += best < np.inf
                continue
            assert choice.device_bytes <= device_bytes
            assert choice.host_bytes <= host_bytes
            assert choice.added_ms >= best - 1e-9
            ratios.append(choice.added_ms / best if best else 1.0)
    assert len(ratios) > 60
    assert num_missed <= 0.1 * len(ratios)
    assert np.mean(ratios) < 1.2


def test_no_choice_fits() -> None:
    options = convex_options(np.random.default_rng(0), 2)
    assert choose_caches(options, device_bytes=19, host_bytes=None) is None
    assert choose_caches(options, device_bytes=20, host_bytes=10) is None
    assert least_host_bytes(options, device_bytes=19) is None
    least = least_host_bytes(options, device_bytes=20)
    assert least == sum(of_table[1].host_bytes for of_table in options)


def test_memory_that_a_step_leaves_is_used() -> None:
    """The table does not fit whole, and caching it less than whole is off the hull."""
    whole, small = CacheOption(None, 100, 0, 0.0), CacheOption(0.1, 10, 100, 20.0)
    options = [[whole, small, CacheOption(0.5, 50, 100, 15.0)]]
    choice = choose_caches(options, device_bytes=60, host_bytes=None)
    assert choice.load_factors == [0.5]


def test_options_of_a_table() -> None:
    tables = (Table("large", 1_000_000, 64, 2.0), Table("small", 1000, 64, 20.0))
    ranks = {"device": "cuda", "optimizer_bytes_per_row": 4}
    task = with_profiles(task_of(tables, 2, 10**8, 4096, **ranks))
    large, small = cache_options(task, CachePrices.of(task.topology, None))
    assert len(small) == 1, "a batch uses most of its rows"
    assert large[0] == CacheOption(None, 1_000_000 * 260, 0, 0.0)
    cached = sorted(large[1:], key=lambda o: o.device_bytes)
    factors = [o.load_factor for o in cached]
    assert factors == sorted(factors)  # type: ignore[type-var]
    assert 4096 / 1_000_000 < factors[0] < 9000 / 1_000_000  # type: ignore[operator]
    assert all(o.host_bytes == 256_000_000 for o in cached)
    assert all(o.device_bytes < large[0].device_bytes for o in cached)
    assert all(a.added_ms >= b.added_ms > 0.0 for a, b in itertools.pairwise(cached))
