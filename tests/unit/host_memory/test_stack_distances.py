"""Stack distances against a stack that is moved access by access."""

import numpy as np
import pytest

from dlrm_sharded.host_memory.stack_distances import _TIE_SALT, NEVER, AccessRecorder, Ids, _hash


def recorded(batches: list[Ids], sampling_rate: float = 1.0) -> AccessRecorder:
    recorder = AccessRecorder(sampling_rate)
    for batch in batches:
        recorder.add(batch)
    return recorder


def brute_force(batches: list[Ids]) -> list[int]:
    """Place in the stack of each access: all of a batch are looked up, then put on top."""
    stack: list[int] = []  # the most recent row first
    distances = []
    for batch in batches:
        unique = np.unique(batch)
        rows = unique[np.argsort(_hash(unique, _TIE_SALT))].tolist()
        distances += [stack.index(row) if row in stack else NEVER for row in rows]
        stack = rows[::-1] + [row for row in stack if row not in set(rows)]
    return distances


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "num_batches"),
    [(50, 7, 30), (300, 40, 20), (20, 1, 200), (10, 10, 1), (5, 20, 9), (1, 1, 3)],
)
def test_is_the_place_in_the_stack(num_rows: int, batch_size: int, num_batches: int) -> None:
    rng = np.random.default_rng(num_rows)
    batches = [rng.integers(0, num_rows, batch_size) for _ in range(num_batches)]
    accesses = recorded(batches).measure()
    assert accesses.distance.tolist() == brute_force(batches)
    assert accesses.num_batches == num_batches
    assert np.bincount(accesses.batch).tolist() == [len(np.unique(batch)) for batch in batches]


def test_single_accesses_are_mattsons() -> None:
    """A b c b a: between the uses of b is one row, between those of a are two."""
    batches = [np.array([row]) for row in (10, 11, 12, 11, 10)]
    assert recorded(batches).measure().distance.tolist() == [NEVER, NEVER, NEVER, 1, 2]


def test_a_sample_has_all_accesses_of_its_rows() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, 5000, 1000) for _ in range(10)]
    whole, sample = recorded(batches).measure(), recorded(batches, 0.25).measure()
    assert len(sample.distance) == pytest.approx(0.25 * len(whole.distance), rel=0.15)
    is_first = sample.distance == NEVER
    assert is_first.sum() == pytest.approx(0.25 * (whole.distance == NEVER).sum(), rel=0.15)


@pytest.mark.parametrize("batches", [[], [np.zeros(0, dtype=np.int64)] * 3])
def test_no_accesses(batches: list[Ids]) -> None:
    assert recorded(batches).measure().distance.tolist() == []
