"""Widths of shards that the installed lookups support."""

import pytest

from dlrm_sharded.plans import tables
from dlrm_sharded.plans.tables import MAX_SHARD_COLUMNS, max_shard_columns
from dlrm_sharded.plans.task import Topology


@pytest.mark.parametrize(
    ("fbgemm", "columns"),
    [("1.6.0", 1024), ("1.6.0+cu130", 1024), ("1.7.0", 2048), ("2.0", 2048), ("0+cpu", 2048)],
)
def test_an_old_fbgemm_looks_up_fewer_columns(
    monkeypatch: pytest.MonkeyPatch, fbgemm: str, columns: int
) -> None:
    """Wrong vectors are worse than an error, so its kernels get no shard as wide as they take."""
    monkeypatch.setattr(tables, "readable_versions", lambda _: {"fbgemm-gpu": fbgemm})
    tables._is_fbgemm_old.cache_clear()
    try:
        assert Topology(8, 2**30, compute_device="cuda").max_shard_columns == columns
        assert max_shard_columns("cpu") == MAX_SHARD_COLUMNS["cpu"]
    finally:
        tables._is_fbgemm_old.cache_clear()
