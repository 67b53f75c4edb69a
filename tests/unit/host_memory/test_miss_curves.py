"""Miss-ratio curves that are measured on a dataset."""

import numpy as np
import pytest

from dlrm_sharded import ConfigError, ShardingTask, Table
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.host_memory import miss_curves
from dlrm_sharded.host_memory.miss_curves import num_curve_batches, with_measured_curves
from dlrm_sharded.host_memory.miss_ratio import expected_curve
from tests.unit.made_up import task_of

BATCH_SIZE = 512


def dataset(num_batches: int = 12) -> SyntheticDataset:
    tables = [Table("large", 20_000, 16, 4.0), Table("small", 10, 16, 1.0)]
    return SyntheticDataset(
        tables, batch_size=BATCH_SIZE, num_train_batches=num_batches, num_val_batches=0
    )


def cached(data: SyntheticDataset, memory: int = 10**5, device: str = "cuda") -> ShardingTask:
    return task_of(data.tables, 2, memory, BATCH_SIZE, device=device)


def ratios(table: Table, shares: np.ndarray) -> np.ndarray:
    return np.interp(shares, *zip(*table.miss_ratio_curve, strict=True))


def test_large_tables_get_a_curve() -> None:
    data = dataset(40)
    large, small = with_measured_curves(cached(data), data, 40).tables
    assert small == data.tables[1], "too small to be worth a cache"
    shares = np.array([0.1, 0.2, 0.3])
    expected = expected_curve(data.tables[0], BATCH_SIZE).ratios(shares)
    assert ratios(large, shares) == pytest.approx(expected, abs=0.05)


def test_a_sample_is_followed_if_there_are_many_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset()
    whole = with_measured_curves(cached(data), data, 12).tables[0]
    monkeypatch.setattr(miss_curves, "MAX_ACCESSES", 10_000)
    sample = with_measured_curves(cached(data), data, 12).tables[0]
    assert sample != whole
    shares = np.linspace(0.1, 0.5, 5)
    assert ratios(sample, shares) == pytest.approx(ratios(whole, shares), abs=0.05)


def test_too_few_batches_say_nothing() -> None:
    data = dataset(1)
    assert with_measured_curves(cached(data), data, 32) == cached(data)


def test_auto_measures_where_gpus_cannot_hold_the_tables() -> None:
    data = dataset()
    assert num_curve_batches("auto", cached(data)) == miss_curves.AUTO_BATCHES
    assert num_curve_batches("auto", cached(data, device="cpu")) == 0
    assert num_curve_batches("auto", cached(data, memory=10**9)) == 0
    assert num_curve_batches(5, cached(data, memory=10**9)) == 5
    for wrong in (-1, "all", None, 2.5):
        with pytest.raises(ConfigError, match=r"^curve_batches is"):
            num_curve_batches(wrong, cached(data))
