"""Keys are counted on disk where they are many, and become rows of a table."""

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded.datasets import vocabulary
from dlrm_sharded.datasets.columns import MAX_KEY, MISSING_KEY, keys_of
from dlrm_sharded.datasets.schema import TableOptions
from dlrm_sharded.datasets.vocabulary import KeyCounts, Vocabulary, write_vocabulary

TEXTS = st.one_of(st.none(), st.text(max_size=30), st.sampled_from(["a", "bb", "x" * 16]))


def table(min_count: int = 1, rows: int | None = None) -> TableOptions:
    return TableOptions("t", ("t",), "vocabulary", rows, min_count, 4)


@given(st.lists(TEXTS, max_size=40))
def test_a_key_is_that_of_the_text_alone(texts: list[str | None]) -> None:
    keys = keys_of(pl.Series(texts, dtype=pl.String))
    for text, key in zip(texts, keys, strict=True):
        alone = keys_of(pl.Series(["something before", text], dtype=pl.String)[1:])
        assert alone.tolist() == [key]
        assert (key == MISSING_KEY) == (not text)
    different = {text for text in texts if text}
    assert len({int(key) for key in keys} - {0}) == len(different)


def test_keys_stay_what_they_are() -> None:
    """Vocabularies on disk and exported models depend on them."""
    keys = keys_of(pl.Series(["a", "12345678", "123456789", "größer als acht Bytes"]))
    assert keys.tolist() == KEYS


KEYS = [15795325021017630820, 4913707060525519221, 18233514069739971710, 9471471928805451603]


@pytest.mark.parametrize("spill_at", [40, 2**22])
def test_keys_that_are_frequent_enough_have_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill_at: int
) -> None:
    monkeypatch.setattr(vocabulary, "SPILL_AT", spill_at)
    monkeypatch.setattr(vocabulary, "MERGE_AT", 10)
    monkeypatch.setattr(vocabulary, "RANGE_PAIRS", 16)
    generator = np.random.default_rng(0)
    pool = generator.integers(1, int(MAX_KEY), 100, dtype=np.uint64)
    counts = [Counter[int](), Counter[int]()]
    for file in range(3):
        counter = KeyCounts(tmp_path, f"counts-{file:05}", 2)
        for number in (0, 1, 1, 0):
            keys = generator.choice(np.append(pool, MISSING_KEY), 50)
            counter.add(number, keys)
            counts[number].update(keys.tolist())
        counter.spill()
    files = sorted(tmp_path.glob("counts-*"))
    assert (len(files) > 3) == (spill_at == 40)
    for number in (0, 1):
        path = tmp_path / f"{number}.npy"
        write_vocabulary(path, files, number, table(min_count=3))
        kept = sorted(key for key, count in counts[number].items() if key and count >= 3)
        found = Vocabulary(path)
        assert found.num_embeddings == 2 + len(kept)
        asked = np.append(pool, np.array([MISSING_KEY, MAX_KEY, 1], np.uint64))
        expected = [kept.index(key) + 2 if key in kept else 1 for key in asked.tolist()]
        expected[len(pool)] = 0
        assert found.rows(asked).tolist() == expected


@pytest.mark.parametrize(("rows", "kept"), [(None, 5), (7, 5), (6, 3), (5, 3), (4, 2), (2, 0)])
def test_the_rarest_keys_go_if_the_table_would_be_too_large(
    tmp_path: Path, rows: int | None, kept: int
) -> None:
    counter = KeyCounts(tmp_path, "counts", 1)
    counter.add(0, np.repeat(np.array([10, 20, 30, 40, 50], np.uint64), [9, 8, 7, 2, 2]))
    counter.spill()
    write_vocabulary(tmp_path / "v.npy", list(tmp_path.glob("counts-*")), 0, table(1, rows))
    found = Vocabulary(tmp_path / "v.npy")
    assert found.num_embeddings == 2 + kept
    assert (found.rows(np.array([10, 20, 30, 40, 50], np.uint64)) > 1).sum() == kept


def test_without_any_key_all_are_rare(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "v.npy", [], 0, table())
    assert Vocabulary(tmp_path / "v.npy").rows(np.array([0, 5], np.uint64)).tolist() == [0, 1]


def test_a_key_may_occur_more_than_2_32_times(tmp_path: Path) -> None:
    counter = KeyCounts(tmp_path, "counts", 1)
    counter.add(0, np.array([7], dtype=np.uint64))
    counter.spill()
    (file,) = tmp_path.glob("counts-*")
    counted = pl.read_parquet(file)
    often = counted.with_columns(pl.lit(3 * 10**9, counted.schema["count"]).alias("count"))
    often.write_parquet(file)
    write_vocabulary(tmp_path / "v.npy", [file, file], 0, table(min_count=5 * 10**9))
    assert Vocabulary(tmp_path / "v.npy").num_embeddings == 3
