from __future__ import annotations

import numpy as np
import pytest

from dlrm_sharded.accesses.zipf import cached_zipf
from dlrm_sharded.commands.asked_task import build_dataset
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.datasets import presets
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.tables import Table
from tests.unit.commands.conftest import composed_config

SYNTHETIC = sorted(
    path.stem
    for path in (CONF_DIR / "data").glob("*.yaml")
    if "base/synthetic" in path.read_text(encoding="utf-8")
)


def num_ids(tables: tuple[Table, ...]) -> float:
    return sum(table.pooling_factor for table in tables)


def gib(tables: tuple[Table, ...]) -> float:
    return sum(4 * table.num_embeddings * table.embedding_dim for table in tables) / 2**30


@pytest.mark.parametrize(
    ("preset", "num_tables", "ids", "size_gib"),
    [
        ("mlperf_dcnv2", 26, 214, 97.4),
        ("criteo_kaggle", 26, 26, 2.0),
        ("rm1", 8, 8 * 80, 3.8),
        ("rm2", 32, 32 * 120, 3.8),
        ("rm3", 10, 10 * 20, 2.4),
        ("t510", 510, 2_670, 426.8),
        ("nvidia_tiny", 55, 85, 4.2),
        ("nvidia_small", 107, 377, 26.3),
        ("embedding_demo", 16, 1346, 0.0868),
        ("hot_and_cold", 11, 1214, 0.1693),
    ],
)
def test_totals_are_the_published_ones(preset, num_tables, ids, size_gib):
    tables = getattr(presets, preset)()
    assert len({table.name for table in tables}) == num_tables
    assert num_ids(tables) == pytest.approx(ids)
    assert gib(tables) == pytest.approx(size_gib, rel=0.02)


@pytest.mark.parametrize("seed", [0, 1])
def test_pool_has_the_statistics_of_dlrm_datasets(seed):
    pool, batch_size = presets.dlrm_datasets_pool(seed), 65_536
    bins, num_unique = np.zeros(17), 0.0
    for table in pool:
        zipf, draws = cached_zipf(table.num_embeddings, 0.9), batch_size * table.pooling_factor
        unique = zipf.expected_num_unique(draws)
        bins += unique * np.array(zipf.expected_reuse_histogram(draws))
        num_unique += unique
    assert len(pool) == 856
    assert num_ids(pool) / 856 == pytest.approx(15.81)
    assert num_unique == pytest.approx(128.4e6, rel=0.05)
    assert batch_size * num_ids(pool) / num_unique == pytest.approx(6.9, rel=0.05)
    published = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001]
    assert bins[:10] / num_unique == pytest.approx(published, abs=0.04)
    in_docstring = [0.475, 0.190, 0.151, 0.092, 0.048, 0.023, 0.011, 0.005, 0.002]
    assert seed or bins[:9] / num_unique == pytest.approx(in_docstring, abs=0.001)


def test_drawing_repeats_tables_under_new_names():
    pool = presets.dlrm_datasets_pool(num_tables=20)
    drawn = presets.draw_tables(pool, num_tables=60, seed=1)
    assert len({table.name for table in drawn}) == 60
    assert {table.embedding_dim for table in drawn} == {4, 8, 16, 32, 64, 128}
    originals = {table.name: table for table in pool}
    for table in drawn:
        original = originals[table.name.split("_")[0]]
        assert table.num_embeddings == original.num_embeddings
        assert table.pooling_factor == original.pooling_factor
    assert drawn == presets.draw_tables(pool, num_tables=60, seed=1)
    assert drawn != presets.draw_tables(pool, num_tables=60, seed=2)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_yaml_builds_a_dataset(name):
    overrides = [f"data={name}", "batch_size=16", "data.max_rows=1000", "data.num_train_batches=1"]
    data = build_dataset(composed_config("train", *overrides))
    assert isinstance(data, SyntheticDataset)
    batch = data.batch("train", 0, rank=1, world_size=2)
    assert batch.labels.shape == (8,)
    assert max(table.num_embeddings for table in data.tables) <= 1_000
