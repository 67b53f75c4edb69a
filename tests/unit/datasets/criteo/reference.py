"""A plain Python reader of Criteo TSVs to compare with, and lines to write."""

import math
from collections import Counter
from pathlib import Path

import numpy as np

from dlrm_sharded.datasets.block_reader import BlockReader
from dlrm_sharded.datasets.criteo import CriteoSource, convert

NUM_ROWS, BLOCK_ROWS = 700, 32
COMMAND = "dlrm_sharded.commands.convert_criteo"


def line(label="1", integers=("5",) * 13, ids=("0000abcd",) * 26) -> str:
    return "\t".join((label, *integers, *ids))


def reference(paths, *, num_val=None, val_paths=(), min_count=1, cap=None):
    """Labels, dense and table rows, one plain Python line at a time."""
    labels, dense, ids = [], [], []
    for path in (*paths, *val_paths):
        for text in path.read_text().splitlines():
            columns = text.split("\t")
            labels.append(int(columns[0]))
            dense.append([math.log(1 + max(0, int(c or "0"))) for c in columns[1:14]])
            raw = [int(c or "0", 16) for c in columns[14:]]
            ids.append([id_ % cap if cap else id_ for id_ in raw])
    if num_val is None:
        num_val = sum(len(path.read_text().splitlines()) for path in val_paths)
    rows = []
    for column in zip(*ids, strict=True):
        counts = Counter(column[: len(labels) - num_val])
        known = sorted(id_ for id_, count in counts.items() if id_ and count >= min_count)
        index = {id_: 2 + i for i, id_ in enumerate(known)}
        rows.append([0 if id_ == 0 else index.get(id_, 1) for id_ in column])
    return np.array(labels), np.array(dense, np.float32), np.array(rows)


def converted(tmp_path, name="blocks", **options) -> BlockReader:
    convert(CriteoSource(block_rows=BLOCK_ROWS, **options), tmp_path / name)
    return BlockReader(tmp_path / name)


def num_embeddings(blocks):
    return tuple(feature.num_embeddings for feature in blocks.manifest.features)


def all_rows(blocks):
    return blocks.rows(0, blocks.manifest.num_rows)


def assert_same(blocks, expected):
    rows = all_rows(blocks)
    labels, dense, ids = expected
    assert np.array_equal(rows.labels, labels)
    np.testing.assert_allclose(rows.dense, dense, rtol=1e-6)
    assert np.array_equal(rows.ids, ids)


def write_lines(path: Path, lines) -> str:
    path.write_text("".join(text + "\n" for text in lines))
    return str(path)
