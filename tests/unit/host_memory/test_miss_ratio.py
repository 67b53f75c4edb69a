"""Miss-ratio curves against caches that are simulated row by row."""

from collections.abc import Callable

import numpy as np
import pytest

from dlrm_sharded.accesses.distribution import AccessDistribution
from dlrm_sharded.accesses.profiles import with_expected_profile
from dlrm_sharded.accesses.zipf import Zipf, scatter_ranks
from dlrm_sharded.host_memory.miss_ratio import (
    MissRatioCurve,
    curve_of,
    expected_curve,
    measured_curve,
)
from dlrm_sharded.host_memory.stack_distances import AccessRecorder, Ids
from dlrm_sharded.plans.cached_memory import CACHE_WAYS
from dlrm_sharded.plans.tables import Table

NUM_ROWS = 8000
SIZES = (320, 960, 2560, 4800, 6400)
NUM_BATCHES = 60
EXPONENTS = (0.0, 0.3, 0.6, 0.9, 1.05, 1.3)

Simulation = Callable[[list[Ids], int], float]


def zipf_batches(
    exponent: float, batch_size: int, num_rows: int = NUM_ROWS, num_batches: int = NUM_BATCHES
) -> list[Ids]:
    rng = np.random.default_rng(int(100 * exponent))
    bits = rng.integers(0, 2**64, (num_batches, batch_size), dtype=np.uint64)
    if exponent == 0.0:
        uniform = AccessDistribution(np.array([0.0, num_rows]), np.ones(1))
        return list(uniform.ranks(bits))
    return list(scatter_ranks(Zipf(num_rows, exponent).ranks(bits), num_rows, 3))


def cyclic_batches(batch_size: int) -> list[Ids]:
    ids = np.arange(batch_size * NUM_BATCHES) % 3000
    return np.split(ids, NUM_BATCHES)


def lru_miss_ratio(batches: list[Ids], num_slots: int) -> float:
    """Look up all rows of a batch, then insert in place of the least recent, ties at random."""
    rng = np.random.default_rng(0)
    used: dict[int, int] = {}
    missed = total = 0
    for time, batch in enumerate(batches):
        rows = np.unique(batch).tolist()
        missing = [row for row in rows if row not in used]
        used.update({row: time for row in rows if row in used})
        if time >= len(batches) // 2:
            missed, total = missed + len(missing), total + len(rows)
        old = [row for row, last in used.items() if last < time]
        recency = np.array([used[row] for row in old]) + rng.random(len(old))
        num_evicted = min(max(0, len(missing) - (num_slots - len(used))), len(old))
        for index in np.argsort(recency)[:num_evicted]:
            del used[old[index]]
        used.update(dict.fromkeys(missing[: num_slots - len(used)], time))
    return missed / total


def fbgemm_miss_ratio(batches: list[Ids], num_slots: int) -> float:
    """The same in sets of 32 rows, of which a row can be in the one that its hash says."""
    num_sets = num_slots // CACHE_WAYS
    row_of = np.full((num_sets, CACHE_WAYS), -1)
    time_of = np.full((num_sets, CACHE_WAYS), -1)
    missed = total = 0
    for time, batch in enumerate(batches):
        rows = np.unique(batch)
        sets = (rows * 0x9E3779B1 % 2**32) * num_sets // 2**32
        found = row_of[sets] == rows[:, None]
        is_hit = found.any(axis=1)
        time_of[sets[is_hit], found[is_hit].argmax(axis=1)] = time
        if time >= len(batches) // 2:
            missed, total = missed + int((~is_hit).sum()), total + len(rows)
        for row, at in zip(rows[~is_hit].tolist(), sets[~is_hit].tolist(), strict=True):
            way = time_of[at].argmin()
            if time_of[at, way] < time:  # rows of the batch itself stay
                row_of[at, way], time_of[at, way] = row, time
    return missed / total


def measured(batches: list[Ids], num_rows: int = NUM_ROWS, rate: float = 1.0) -> MissRatioCurve:
    recorder = AccessRecorder(rate)
    for batch in batches:
        recorder.add(batch)
    return measured_curve(recorder.measure(), num_rows)


def largest_error(curve: MissRatioCurve, batches: list[Ids], simulate: Simulation) -> float:
    return max(abs(curve.ratio(size / NUM_ROWS) - simulate(batches, size)) for size in SIZES)


@pytest.mark.parametrize("batch_size", [300, 2000])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_measured_curve_is_that_of_the_cache(exponent: float, batch_size: int) -> None:
    batches = zipf_batches(exponent, batch_size)
    assert largest_error(measured(batches), batches, lru_miss_ratio) < 0.01


@pytest.mark.parametrize("batch_size", [300, 1000])
def test_measured_curve_of_a_cyclic_scan(batch_size: int) -> None:
    """All rows miss in a cache that is smaller than the cycle by a batch; none in a larger one."""
    batches = cyclic_batches(batch_size)
    curve = measured(batches)
    assert largest_error(curve, batches, lru_miss_ratio) < 0.01
    assert curve.ratio((3000 - batch_size) / NUM_ROWS) == 1.0
    assert curve.ratio(3000 / NUM_ROWS) == 0.0


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_sets_of_32_rows_matter_little(exponent: float) -> None:
    batches = zipf_batches(exponent, 300)
    assert largest_error(measured(batches), batches, fbgemm_miss_ratio) < 0.03


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_sampled_curve(exponent: float) -> None:
    """The error is within 2 / sqrt(accesses that are followed and counted)."""
    num_rows, rate = 100_000, 0.1
    batches = zipf_batches(exponent, 20_000, num_rows, 24)
    whole, sample = measured(batches, num_rows), measured(batches, num_rows, rate)
    shares = np.linspace(0.01, 0.95, 30)
    num_counted = rate * sum(len(np.unique(batch)) for batch in batches[12:])
    error = np.abs(sample.ratios(shares) - whole.ratios(shares)).max()
    assert error < 2.0 / np.sqrt(num_counted)


def expected(exponent: float, num_rows: int, batch_size: int) -> MissRatioCurve:
    table = Table("t", num_rows, 4, 1.0)
    (table,) = with_expected_profile([table], batch_size=batch_size, exponent=exponent)
    return expected_curve(table, batch_size)


@pytest.mark.parametrize("exponent", EXPONENTS[1:])
def test_expected_curve(exponent: float) -> None:
    """Che's approximation, with the exponent that a reuse histogram tells, of a steady state."""
    num_rows, batch_size = 2000, 400
    batches = zipf_batches(exponent, batch_size, num_rows, 600)
    shares = np.linspace(0.1, 0.9, 9)
    found = expected(exponent, num_rows, batch_size).ratios(shares)
    assert found == pytest.approx(measured(batches, num_rows).ratios(shares), abs=0.03)


@pytest.mark.parametrize("exponent", [0.6, 0.9, 1.05])
def test_few_batches_and_the_tail_that_is_expected(exponent: float) -> None:
    num_rows, batch_size = 8000, 400
    long_run = measured(zipf_batches(exponent, batch_size, num_rows, 600), num_rows)
    few = measured(zipf_batches(exponent, batch_size, num_rows, 12), num_rows)
    with_tail = few.with_tail_of(expected(exponent, num_rows, batch_size))
    shares = np.linspace(0.05, 0.9, 18)
    assert np.abs(few.ratios(shares) - long_run.ratios(shares)).max() > 0.2
    assert np.abs(with_tail.ratios(shares) - long_run.ratios(shares)).max() < 0.1
    seen = few.ratios(np.array([0.01, 0.02, 0.05]))
    assert with_tail.ratios(np.array([0.01, 0.02, 0.05])) == pytest.approx(seen, abs=0.01)


def test_a_curve_that_was_measured_to_its_end_has_no_other_tail() -> None:
    curve = measured(cyclic_batches(300))
    assert curve.with_tail_of(expected_curve(Table("t", NUM_ROWS, 4, 1.0), 300)) == curve


def test_expected_curve_of_tables_without_accesses() -> None:
    for table in (Table("none", 100, 4, 0.0), Table("one", 1, 4, 3.0)):
        assert expected_curve(table, 64).ratio(0.5) == 0.0
    assert expected_curve(Table("unknown", 1000, 4, 2.0), 64).ratio(0.01) > 0.5


def test_measured_curve_counts() -> None:
    points = ((0.0, 1.0), (0.5, 0.25), (1.0, 0.0))
    table = Table("t", 1000, 4, 2.0, miss_ratio_curve=points)
    assert curve_of(table, 64).points == points
    assert curve_of(table, 64).ratio(0.75) == 0.125


def test_curves_need_few_points_and_never_rise() -> None:
    curve = measured(zipf_batches(0.9, 300))
    shares, ratios = np.array(curve.points).T
    assert len(shares) < 100
    assert (np.diff(shares) > 0).all()
    assert (np.diff(ratios) <= 0).all()
    assert (shares[0], shares[-1], ratios[-1]) == (0.0, 1.0, 0.0)
    Table("t", NUM_ROWS, 4, 1.0, miss_ratio_curve=curve.points)  # a table accepts them


def test_no_batches() -> None:
    assert measured([], 10).ratio(0.5) == 0.0
