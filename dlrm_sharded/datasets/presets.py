"""Tables of published tasks, and a pool of tables that stands in for Meta's data.

The tables have no reuse histograms, because these depend on the batch size and the data.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from dlrm_sharded.plans.tables import Table

log = logging.getLogger(__name__)

Tables = tuple[Table, ...]

PAPER_DIMS = (4, 8, 16, 32, 64, 128)
"""Widths of the tables that the papers draw."""

# log-normal rows and ids per sample; the docstring of dlrm_datasets_pool says how they were fitted
_MEAN_POOLING_FACTOR = 15.81
_LOG_IDS_SPREAD = 1.2
_MAX_LOG_IDS = 2.5  # in spreads; no table has more than 20 times the ids of the median table
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
    """Return MLPerf training's DLRM-DCNv2 on multi-hot Criteo 1TB: 26 tables, 214 ids, 97 GiB."""
    return tuple(
        Table(f"cat_{i}", rows, embedding_dim, float(ids))
        for i, (rows, ids) in enumerate(zip(_MLPERF_ROWS, _MLPERF_IDS, strict=True))
    )


def criteo_kaggle(embedding_dim: int = 16) -> Tables:
    """Return the 26 one-hot tables of Criteo's Kaggle display advertising challenge."""
    return tuple(Table(f"cat_{i}", rows, embedding_dim, 1.0) for i, rows in enumerate(_KAGGLE_ROWS))


def rm1() -> Tables:
    """Return RM1 of DeepRecSys (arXiv:2001.02772): 8 tables with 80 ids each."""
    return _groups([(8, 80, 4_000_000, 32)])


def rm2() -> Tables:
    """Return RM2 of DeepRecSys: 32 tables with 120 ids each."""
    return _groups([(32, 120, 500_000, 64)])


def rm3() -> Tables:
    """Return RM3 of DeepRecSys: 10 tables with 20 ids each."""
    return _groups([(10, 20, 2_000_000, 32)])


def t510(embedding_dim: int = 128) -> Tables:
    """Return HugeCTR's synthetic task: 510 tables, 2,670 ids, Zipf exponent 1.1."""
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
    """Return "tiny" of NVIDIA's distributed-embeddings: 55 tables, 85 ids, 4.2 GiB, exponent 1.05.

    Where two features share a table there, a single feature has the ids of both here.
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
    """Return "small" of the same collection: 107 tables, 377 ids, 26.3 GiB."""
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
    """Return 16 very different tables for a small machine: 93 MB, 1,346 ids per sample.

    A few tables have most of the lookups, so that their placement decides the step time. Sorting by
    size, by width and by number of lookups gives different orders.
    """
    return _groups(
        [
            (1, 360.0, 40_000, 32),
            (1, 260.0, 20_000, 64),
            (1, 180.0, 100_000, 32),
            (1, 140.0, 5_000, 48),
            (1, 110.0, 60_000, 64),
            (1, 90.0, 150_000, 16),
            (1, 70.0, 10_000, 128),
            (1, 50.0, 80_000, 32),
            (1, 40.0, 30_000, 64),
            (1, 30.0, 200_000, 16),
            (1, 6.5, 10_000, 32),
            (1, 4.0, 50_000, 16),
            (1, 2.5, 2_000, 64),
            (1, 1.0, 150_000, 4),
            (1, 1.0, 1_000, 8),
            (1, 1.0, 5_000, 48),
        ]
    )


def hot_and_cold() -> Tables:
    """Return 4 small tables with nearly all lookups and 7 large ones: 182 MB, 1,214 ids per sample.

    Four ranks compute equally long if each has one of the small tables. Plans that balance only
    sizes put all of these on one rank.
    """
    return _groups([(4, 300.0, 5_000, 32), (7, 2.0, 100_000, 64)])


def dlrm_datasets_pool(seed: int = 0, num_tables: int = 856, embedding_dim: int = 64) -> Tables:
    """Return tables with the statistics of Meta's dlrm_datasets, for use without its files.

    Expected statistics at batch size 65,536 and Zipf exponent 0.9, with seed 0 and as published:
        mean pooling factor    15.81     15.81
        ids                    886.9 M   887.0 M
        unique rows            127.9 M   128.4 M
        mean reuse             6.9       6.9
        share of unique rows   .475 .190 .151 .092 .048 .023 .011 .005 .002
          by reuse bin         .473 .152 .139 .112 .072 .032 .011 .005 .002
    Seeds 0 to 7 have 125 to 132 M unique rows. The widths are not published.

    Rows and ids per sample are log-normal and correlated; means, spreads and correlation were
    fitted to the published figures. The total of 343 M rows follows from the fit.
    """
    rng = np.random.default_rng(seed)
    quantiles = (np.arange(num_tables) + 0.5) / num_tables
    # every seed has the same rows and the same pooling factors, but pairs them differently
    normal_quantiles = np.array([NormalDist().inv_cdf(q) for q in quantiles])
    log_rows, independent = rng.permutation(normal_quantiles), rng.permutation(normal_quantiles)
    rows = np.clip(10 ** (_LOG10_ROWS_MEAN + _LOG10_ROWS_SPREAD * log_rows), 10, 4e7)
    log_ids = _ROWS_CORRELATION * log_rows + math.sqrt(1 - _ROWS_CORRELATION**2) * independent
    ids = np.exp(_LOG_IDS_SPREAD * np.minimum(log_ids, _MAX_LOG_IDS))
    ids *= _MEAN_POOLING_FACTOR / ids.mean()
    return tuple(
        Table(f"t{i:03d}", round(rows[i]), embedding_dim, float(ids[i])) for i in range(num_tables)
    )


def draw_tables(
    pool: Sequence[Table], *, num_tables: int, dims: Sequence[int] = PAPER_DIMS, seed: int = 0
) -> Tables:
    """Draw tables from the pool with replacement and give them random widths, as the papers do."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(pool), size=num_tables)
    widths = rng.integers(len(dims), size=num_tables)
    return tuple(
        dataclasses.replace(
            pool[table], name=f"{pool[table].name}_{i:03d}", embedding_dim=int(dims[width])
        )
        for i, (table, width) in enumerate(zip(drawn, widths, strict=True))
    )


def cap_rows(tables: Sequence[Table], max_rows: int | None) -> Tables:
    """Return the tables with at most `max_rows` rows, and warn if that cuts any."""
    if max_rows is None:
        return tuple(tables)
    capped = tuple(
        dataclasses.replace(table, num_embeddings=min(table.num_embeddings, max_rows))
        for table in tables
    )
    num_cut = sum(table.num_embeddings > max_rows for table in tables)
    if num_cut:
        log.warning(
            "max_rows=%s cuts %d of %d tables: %.2f GiB instead of %.2f GiB of fp32 weights",
            f"{max_rows:,}",
            num_cut,
            len(tables),
            num_bytes(capped) / 2**30,
            num_bytes(tables) / 2**30,
        )
    return capped


def num_bytes(tables: Sequence[Table]) -> int:
    """Return the bytes of the weights, as `Topology` counts them by default."""
    return sum(4 * table.num_embeddings * table.embedding_dim for table in tables)


def _groups(groups: Sequence[tuple[int, float, int, int]]) -> Tables:
    """Return the tables of groups of identical tables: (count, ids per sample, rows, width)."""
    shapes = [group[1:] for group in groups for _ in range(group[0])]
    return tuple(
        Table(f"t{i:03d}", rows, width, float(ids)) for i, (ids, rows, width) in enumerate(shapes)
    )
