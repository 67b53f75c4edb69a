"""Writes a small set of MLPerf's multi-hot Criteo by the steps of its reference.

They are those of torchrec.datasets.criteo.BinaryCriteoUtils (`tsv_to_npys`, `shuffle`), and of
`materialize_synthetic_multihot_dataset.py` of mlcommons/training with its `multi_hot.py`.
"""

from pathlib import Path

import numpy as np
import torch

from dlrm_sharded.datasets.presets import mlperf_dcnv2

IDS = [int(table.pooling_factor) for table in mlperf_dcnv2()]
DAY_ROWS = (31, 18, 0, 12, 25)


def write_days(folder: Path, rows: tuple[int, ...] = DAY_ROWS, *, max_rows: int = 50) -> None:
    rng = np.random.RandomState(0)
    embeddings = [min(table.num_embeddings, max_rows) for table in mlperf_dcnv2()]
    multi_hot = [
        torch.from_numpy(
            np.concatenate(
                (np.arange(num)[:, np.newaxis], rng.randint(0, num, size=(num, ids - 1))), axis=-1
            )
        ).int()
        for num, ids in zip(embeddings, IDS, strict=True)
    ]
    folder.mkdir(exist_ok=True)
    for day, num in enumerate(rows):
        integers = rng.randint(-3, 1000, size=(num, 13)).astype(np.int32)
        dense = np.log(integers - (integers.min(initial=0) - 2), dtype=np.float32)
        labels = (integers[:, 0] % 2).astype(np.int32).reshape((-1, 1))
        sparse = rng.randint(2, 10_000, size=(num, 26)).astype(np.int32)
        if day < len(rows) - 1:  # shuffled with others in one array of fp32, and cut out of it
            whole = np.concatenate([dense, sparse, labels], axis=1, dtype=np.float32)
            rng.shuffle(whole)
            dense, labels = whole[:, :13], whole[:, 39:].astype(np.int32)
            sparse = whole[:, 13:39].astype(np.int32)
        by_feature = {
            str(i): torch.nn.functional.embedding(
                torch.from_numpy(sparse[:, i] % embeddings[i]), multi_hot[i]
            ).numpy()
            for i in range(26)
        }
        np.save(folder / f"day_{day}_dense.npy", dense)
        np.save(folder / f"day_{day}_labels.npy", labels)
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **by_feature)
