"""Ids that a table lacks, ids below 0, and lengths that contradict the ids."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.id_check import IdCheck, IdFault, find_faults
from dlrm_sharded.plans.tables import Table

USER, FILM = Table("user", 10, 4, 1.0), Table("film", 3, 4, 1.0)
TABLES = {table.name: table for table in (USER, FILM)}


def features(
    user: list[int], film: list[int], lengths: list[int] | None = None, dtype: type | None = None
) -> KeyedJaggedTensor:
    """Features of one id a sample, unless they have other lengths."""
    own = [1] * (len(user) + len(film)) if lengths is None else lengths
    return KeyedJaggedTensor(
        ["user", "film"],
        torch.tensor([*user, *film], dtype=dtype or torch.int64),
        lengths=torch.tensor(own, dtype=torch.int32),
    )


def batch(sparse: KeyedJaggedTensor) -> Batch:
    num_samples = sparse.lengths().numel() // 2
    return Batch(torch.zeros(num_samples, 1), sparse, torch.zeros(num_samples))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_faults_by_feature(dtype):
    assert find_faults(features([9, 0], [2, 2], dtype=dtype), TABLES) == []
    beyond, negative = find_faults(features([12, 10], [-1, 5], dtype=dtype), TABLES)
    text = "feature 'user' of table 'user' has ids beyond its 10 rows (2, up to 12)"
    assert beyond == IdFault("user", 2, text, is_fatal=False)
    text = "feature 'film' of table 'film' has ids below 0 (1, down to -1)"
    assert negative == IdFault("film", 1, text, is_fatal=True)


@pytest.mark.parametrize(
    ("lengths", "num_samples"),
    [([1, 1, 1, 0], 2), ([2, -1, 1, 2], 2), ([2, 0, 1, 1, 0, 0], 2), ([4, 0], 2)],
    ids=["too_few", "negative", "more_samples", "fewer_samples"],
)
def test_lengths_that_contradict_the_ids(lengths, num_samples):
    (fault,) = find_faults(features([1, 1], [1, 1], lengths), TABLES, num_samples)
    assert fault.is_fatal
    assert fault.table is None
    assert f"sum to {sum(lengths)} " in fault.text


def test_ids_of_a_type_that_no_lookup_takes():
    (fault,) = find_faults(features([1], [1], dtype=torch.float32), TABLES)
    assert fault.is_fatal
    assert fault.text == "ids are torch.float32, while lookups take torch.int32 or torch.int64"


ids = st.lists(st.integers(-3, 15), min_size=3, max_size=3)


@given(ids, ids)
def test_row_zero_takes_the_place_of_wrong_ids_alone(user, film):
    check = IdCheck([USER, FILM], "warn")
    checked = check(batch(features(user, film)), 4).sparse_features
    limits = [10] * 3 + [3] * 3
    right = [i if 0 <= i < rows else 0 for i, rows in zip(user + film, limits, strict=True)]
    assert checked.values().tolist() == right
    assert checked.lengths().tolist() == [1] * 6
    assert bool(check.take(5)) == (right != user + film)


def test_faults_are_taken_once_and_by_batch():
    check = IdCheck([USER, FILM], "warn")
    for number in range(3):
        check(batch(features([10], [number])), number)
    assert [number for number, _ in check.take(2)] == [0, 1]
    assert [number for number, _ in check.take(9)] == [2]
    assert check.take(9) == []


def test_a_batch_with_wrong_lengths_loses_its_ids():
    check = IdCheck([USER, FILM], "warn")
    checked = check(batch(features([1, 1], [1, 1], [1, 1, 1, 0])), 0).sparse_features
    assert checked.values().numel() == 0
    assert checked.lengths().tolist() == [0] * 4
    assert check.take(1)[0][1].is_fatal


def test_features_of_one_table():
    item = dataclasses.replace(USER, name="item", num_features=2, features=("user", "film"))
    check = IdCheck([item], "warn")
    checked = check(batch(features([12, 4], [3, 10])), 0).sparse_features
    assert checked.values().tolist() == [0, 4, 3, 0]
    beyond = "of table 'item' has ids beyond its 10 rows (1, up to"
    assert [fault for _, fault in check.take(1)] == [
        IdFault("item", 1, f"feature 'user' {beyond} 12)", is_fatal=False),
        IdFault("item", 1, f"feature 'film' {beyond} 10)", is_fatal=False),
    ]


def test_bounds():
    wrong = batch(features([99], [-5]))
    ignoring = IdCheck([USER, FILM], "ignore")
    assert ignoring(wrong, 0) is wrong
    assert ignoring.take(1) == []
    strict = IdCheck([USER, FILM], "error")
    strict(batch(features([99], [0])), 0)
    assert strict.take(1)[0][1].is_fatal


def test_right_batches_are_not_copied():
    right = batch(features([1], [1]))
    assert IdCheck([USER, FILM], "warn")(right, 0) is right
