from pathlib import Path

import pytest

from dlrm_sharded.datasets import criteo_convert, criteo_tsv
from dlrm_sharded.datasets.criteo import CriteoSource, convert
from dlrm_sharded.datasets.criteo_sample import write_criteo_sample
from tests.unit.datasets.criteo.reference import BLOCK_ROWS, NUM_ROWS


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("criteo") / "train.txt"
    write_criteo_sample(path, num_rows=NUM_ROWS)
    return path


@pytest.fixture(scope="module")
def blocks_dir(sample) -> Path:
    folder = sample.parent / "blocks"
    convert(CriteoSource(str(sample), block_rows=BLOCK_ROWS), folder)
    return folder


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(criteo_tsv, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr(criteo_convert, "PIECE_ROWS", 37)
