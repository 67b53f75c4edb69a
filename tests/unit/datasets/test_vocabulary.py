from collections import Counter

import numpy as np
import pytest

from dlrm_sharded.datasets import vocabulary
from dlrm_sharded.datasets.vocabulary import IdCounter, Vocabulary


def expected_rows(ids, known):
    rows = {int(id_): 2 + i for i, id_ in enumerate(known)}
    return [0 if id_ == 0 else rows.get(int(id_), 1) for id_ in ids]


@pytest.mark.parametrize("merge_at", [1, 100, 1 << 20])
@pytest.mark.parametrize("min_count", [1, 2, 5])
def test_counter_counts_over_pieces(monkeypatch, merge_at, min_count):
    monkeypatch.setattr(vocabulary, "MERGE_AT", merge_at)
    rng = np.random.default_rng(0)
    ids = (rng.zipf(1.3, 5000) % 3000).astype(np.uint32)
    ids[::50] = 2**32 - 1
    counter = IdCounter()
    for piece in np.array_split(ids, 13):
        counter.add(piece)
    counter.add(ids[:0])
    counts = Counter(ids.tolist())
    expected = sorted(id_ for id_, count in counts.items() if count >= min_count and id_)
    assert counter.ids(min_count=min_count).tolist() == expected


def test_counter_of_nothing():
    assert IdCounter().ids(min_count=1).tolist() == []


@pytest.mark.parametrize(
    "known",
    [
        pytest.param([], id="empty"),
        pytest.param([7], id="one"),
        pytest.param([2**32 - 1], id="largest"),
        pytest.param([1, 2, 3, 4, 5, 2**31, 2**32 - 1], id="ends"),
        pytest.param(range(1, 5000), id="dense"),
        pytest.param([*range(10**6, 10**6 + 3000), 2**32 - 2], id="clustered"),
        pytest.param(np.unique(np.random.default_rng(1).integers(1, 2**32, 4000)), id="uniform"),
        pytest.param(np.arange(1, 2**32, 2**20), id="even"),
    ],
)
def test_rows_of_known_and_unknown_ids(known):
    known = np.array(list(known), np.uint32)
    rng = np.random.default_rng(2)
    near = np.concatenate([known, known + np.uint32(1), known - np.uint32(1)])
    unknown = rng.integers(0, 2**32, 5000, dtype=np.uint32)
    ids = np.concatenate([near, unknown, np.array([0, 1, 2**32 - 1, 2**31], np.uint32)])
    vocab = Vocabulary(known)
    rows = vocab.rows(ids)
    assert rows.dtype == np.int32
    assert rows.tolist() == expected_rows(ids, known)
    assert vocab.num_embeddings == 2 + len(known)
    assert rows.max() < vocab.num_embeddings
