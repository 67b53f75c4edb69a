from __future__ import annotations

import math

import numpy as np
import pytest

from dlrm_sharded.accesses.profiles import with_expected_profile
from dlrm_sharded.accesses.zipf import Zipf, scatter_ranks
from dlrm_sharded.datasets.counter_random import (
    counters,
    normals,
    random_bits,
    stream_key,
    uniform_pairs,
    uniforms,
)
from tests.unit.synthetic import tables_of

NUM_DRAWS = 400_000


def draw(num_ids: int, exponent: float, num_draws: int = NUM_DRAWS, key: int = 1) -> np.ndarray:
    return Zipf(num_ids, exponent).ranks(random_bits(key, counters(0, num_draws)))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 0.9, 1.0, 1.1])
@pytest.mark.parametrize("num_ids", [1, 2, 10, 600, 5_000])
def test_ranks_have_zipf_frequencies(num_ids: int, exponent: float) -> None:
    counts = np.bincount(draw(num_ids, exponent), minlength=num_ids)
    expected = np.arange(1, num_ids + 1, dtype=float) ** -exponent
    expected *= NUM_DRAWS / expected.sum()
    assert counts.size == num_ids
    assert np.all(np.abs(counts - expected) <= 5.5 * np.sqrt(expected) + 0.01 * expected + 5)


def test_slope_of_frequency_over_rank_is_the_exponent() -> None:
    ranks = draw(10_000_000, 0.9, 1_000_000)
    counts, edges = np.histogram(ranks + 1, bins=np.geomspace(1, 1e7, 15).round())
    density = np.log(counts / np.diff(edges))
    slope = np.polyfit(np.log(edges[:-1] * edges[1:]) / 2, density, 1)[0]
    assert slope == pytest.approx(-0.9, abs=0.03)


@pytest.mark.parametrize("num_ids", [1, 2, 3, 4, 10, 36, 1_000, 39_060])
def test_scattering_is_one_to_one(num_ids: int) -> None:
    ids = scatter_ranks(np.arange(num_ids), num_ids, shift=12345)
    assert sorted(ids.tolist()) == list(range(num_ids))


def test_scattering_stays_exact_in_large_tables() -> None:
    num_ids = 2**31 - 1
    ranks = np.array([0, 1, num_ids // 2, num_ids - 1])
    stride = int(scatter_ranks(np.array([1]), num_ids, shift=0)[0])
    exact = [(rank * stride + 7) % num_ids for rank in ranks.tolist()]
    assert scatter_ranks(ranks, num_ids, shift=7).tolist() == exact


def test_popular_ids_lie_all_over_the_table() -> None:
    ids = scatter_ranks(np.arange(64), 1_000_000, shift=stream_key("x"))
    per_eighth = np.bincount(ids // 125_000, minlength=8)
    assert per_eighth.min() >= 4


def test_no_draws_use_nothing() -> None:
    (table,) = with_expected_profile(tables_of((10, 4, 0.0)), batch_size=8, exponent=0.9)
    assert table.reuse_histogram == (0.0,) * 17


def test_streams_are_apart_and_counters_are_random_access() -> None:
    assert stream_key(0, "a") != stream_key(0, "b") != stream_key("0", "b")
    whole = random_bits(9, counters(0, 1_000))
    assert np.array_equal(whole[600:700], random_bits(9, counters(600, 100)))
    assert not np.intersect1d(whole, random_bits(10, counters(0, 1_000))).size
    assert splitmix64(0)(3) == int(random_bits(0, counters(1, 3))[2])


def splitmix64(seed: int):  # type: ignore[no-untyped-def]  # the published loop, in plain Python
    def element(number: int) -> int:
        mask, state, z = 2**64 - 1, seed, 0
        for _ in range(number):
            state = (state + 0x9E3779B97F4A7C15) & mask
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            z ^= z >> 31
        return z

    return element


def test_uniform_and_normal_moments() -> None:
    counter = counters(0, 200_000)
    u, (a, b), n = uniforms(1, counter), uniform_pairs(2, counter), normals(3, counter)
    for sample in (u, a, b):
        assert sample.min() >= 0
        assert sample.max() < 1
        assert sample.mean() == pytest.approx(0.5, abs=0.005)
        assert sample.std() == pytest.approx(math.sqrt(1 / 12), abs=0.005)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.01
    assert n.mean() == pytest.approx(0, abs=0.01)
    assert n.std() == pytest.approx(1, abs=0.01)
