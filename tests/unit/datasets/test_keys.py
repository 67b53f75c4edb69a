"""Keys of ids depend on their texts alone."""

import polars as pl

from dlrm_sharded.datasets.columns import MISSING_KEY, keys_of


def test_a_null_of_a_parquet_file_is_missing(tmp_path):
    """Polars leaves the length of another value in its place."""
    texts = pl.DataFrame({"city": ["a", None, "", "city b", None, "a"] * 9})
    texts.write_parquet(tmp_path / "rows.parquet")
    keys = keys_of(pl.read_parquet(tmp_path / "rows.parquet")["city"])
    assert (keys == keys_of(texts["city"])).all()
    assert (keys[:5] == MISSING_KEY).tolist() == [False, True, True, False, True]
