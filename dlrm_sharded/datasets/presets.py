"""The tables of published tasks, and pools that stand for data that cannot be had.

Tables here have no reuse histogram: it belongs to a batch size and to data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from dlrm_sharded.tables import Table

Tables = tuple[Table, ...]

# dlrm_datasets_pool: log-normal rows and ids per sample; fitted, see there
_MEAN_POOLING_FACTOR = 15.81
_LOG_IDS_SPREAD = 1.2
_MAX_LOG_IDS = 2.5  # in spreads: no table has over 20 times the ids of the median one
_LOG10_ROWS_MEAN = 4.88
_LOG10_ROWS_SPREAD = 0.8
_ROWS_CORRELATION = 0.7

# fmt: off
_MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956,
    405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152,
    12_973, 108, 36,
)
_MLPERF_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_KAGGLE_ROWS = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194,
    27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)
# fmt: on


def mlperf_dcnv2(embedding_dim: int = 128) -> Tables:
    """MLPerf training's DLRM-DCNv2 on multi-hot Criteo 1TB: 26 tables, 214 ids, 97 GiB."""
    return tuple(
        Table(f"cat_{i}", rows, embedding_dim, float(ids))
        for i, (rows, ids) in enumerate(zip(_MLPERF_ROWS, _MLPERF_IDS, strict=True))
    )


def criteo_kaggle(embedding_dim: int = 16) -> Tables:
    """Criteo's Kaggle display advertising challenge: 26 one-hot tables."""
    return tuple(Table(f"cat_{i}", rows, embedding_dim, 1.0) for i, rows in enumerate(_KAGGLE_ROWS))


def rm1() -> Tables:
    """DeepRecSys (arXiv:2001.02772) RM1: 8 tables with 80 ids each."""
    return _groups([(8, 80, 4_000_000, 32)])


def rm2() -> Tables:
    """DeepRecSys RM2: 32 tables with 120 ids each."""
    return _groups([(32, 120, 500_000, 64)])


def rm3() -> Tables:
    """DeepRecSys RM3: 10 tables with 20 ids each."""
    return _groups([(10, 20, 2_000_000, 32)])


def t510(embedding_dim: int = 128) -> Tables:
    """HugeCTR's synthetic task of 510 tables and 2,670 ids, drawn there with Zipf exponent 1.1."""
    groups = [
        (100, 1, 1_000),
        (150, 1, 100_000),
        (20, 1, 1_000_000),
        (50, 1, 2_000_000),
        (150, 1, 4_000_000),
        (20, 10, 4_000_000),
        (20, 100, 4_000_000),
    ]
    return _groups([(*group, embedding_dim) for group in groups])


def nvidia_tiny() -> Tables:
    """NVIDIA distributed-embeddings' synthetic "tiny": 55 tables, 85 ids, 4.2 GiB; exponent 1.05.

    A table that two features share there is one feature with the ids of both here.
    """
    return _groups(
        [
            (1, 1 + 10, 10_000, 8),
            (1, 1 + 10, 1_000_000, 16),
            (1, 1 + 10, 25_000_000, 16),
            (1, 1, 25_000_000, 16),
            (16, 1, 10, 8),
            (10, 1, 1_000, 8),
            (4, 1, 10_000, 8),
            (2, 1, 100_000, 16),
            (19, 1, 1_000_000, 16),
        ]
    )


def nvidia_small() -> Tables:
    """The same collection's "small": 107 tables, 377 ids, 26.3 GiB; sharing as in `nvidia_tiny`."""
    return _groups(
        [
            (5, 1 + 30, 10_000, 16),
            (3, 1 + 30, 4_000_000, 32),
            (1, 1 + 30, 50_000_000, 32),
            (1, 1, 50_000_000, 32),
            (30, 1, 10, 16),
            (30, 1, 1_000, 16),
            (5, 1, 10_000, 16),
            (5, 1, 100_000, 32),
            (27, 1, 4_000_000, 32),
        ]
    )


def embedding_demo() -> Tables:
    """16 very unequal tables for a small machine: 93 MB, 1,346 ids per sample.

    A few busy tables make most of the work, so that where they go decides the step time; size,
    width and number of lookups rank them differently.
    """
    return _groups(
        [
            (1, *table)
            for table in [  # ids, rows, width
                (360.0, 40_000, 32),
                (260.0, 20_000, 64),
                (180.0, 100_000, 32),
                (140.0, 5_000, 48),
                (110.0, 60_000, 64),
                (90.0, 150_000, 16),
                (70.0, 10_000, 128),
                (50.0, 80_000, 32),
                (40.0, 30_000, 64),
                (30.0, 200_000, 16),
                (6.5, 10_000, 32),
                (4.0, 50_000, 16),
                (2.5, 2_000, 64),
                (1.0, 150_000, 4),
                (1.0, 1_000, 8),
                (1.0, 5_000, 48),
            ]
        ]
    )


def dlrm_datasets_pool(seed: int = 0, num_tables: int = 856, embedding_dim: int = 64) -> Tables:
    """Tables with the statistics of Meta's dlrm_datasets, where its files are not at hand.

    In expectation at batch 65,536 and Zipf exponent 0.9 (`Zipf.expected_num_unique`; seed 0, and
    Meta's in brackets): mean pooling factor 15.81 (15.81), 886.9 M ids (887.0 M), 127.9 M unique
    rows (128.4 M), mean reuse 6.9 (6.9), and of the unique rows, by reuse bin,
    .475 .190 .151 .092 .048 .023 .011 .005 .002 (.473 .152 .139 .112 .072 .032 .011 .005 .002).
    Seeds 0 to 7 have 125 to 132 M unique rows. The widths are not published.

    Rows and ids per sample are log-normal, larger tables have more ids; means, spreads and
    correlation were fitted to Meta's figures. The 343 M rows in all follow from the fit.
    """
    rng = np.random.default_rng(seed)
    quantiles = (np.arange(num_tables) + 0.5) / num_tables
    # every seed has the same rows and the same pooling factors, paired in another way
    even = np.array([NormalDist().inv_cdf(q) for q in quantiles])
    log_rows, independent = rng.permutation(even), rng.permutation(even)
    rows = np.clip(10 ** (_LOG10_ROWS_MEAN + _LOG10_ROWS_SPREAD * log_rows), 10, 4e7)
    log_ids = _ROWS_CORRELATION * log_rows + math.sqrt(1 - _ROWS_CORRELATION**2) * independent
    ids = np.exp(_LOG_IDS_SPREAD * np.minimum(log_ids, _MAX_LOG_IDS))
    ids *= _MEAN_POOLING_FACTOR / ids.mean()
    return tuple(
        Table(f"t{i:03d}", round(rows[i]), embedding_dim, float(ids[i])) for i in range(num_tables)
    )


def draw_tables(
    pool: Sequence[Table],
    *,
    num_tables: int,
    dims: Sequence[int] = (4, 8, 16, 32, 64, 128),
    seed: int = 0,
) -> Tables:
    """A task as the papers draw them: tables of the pool, with replacement, and random widths."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(pool), size=num_tables)
    widths = rng.integers(len(dims), size=num_tables)
    return tuple(
        dataclasses.replace(
            pool[table], name=f"{pool[table].name}_{i:03d}", embedding_dim=int(dims[width])
        )
        for i, (table, width) in enumerate(zip(drawn, widths, strict=True))
    )


def _groups(groups: Sequence[tuple[int, float, int, int]]) -> Tables:
    """The tables of groups of equal tables: (count, ids per sample, rows, width)."""
    each = [group[1:] for group in groups for _ in range(group[0])]
    return tuple(
        Table(f"t{i:03d}", rows, width, float(ids)) for i, (ids, rows, width) in enumerate(each)
    )
