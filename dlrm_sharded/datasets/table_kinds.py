"""Kinds of tables from which tasks to train and test policies are drawn.

The tables have no reuse histograms, because these depend on the batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dlrm_sharded.accesses.patterns import AccessPattern, draw_accesses
from dlrm_sharded.datasets.presets import PAPER_DIMS, Tables, dlrm_datasets_pool
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB

HALVES = ("training", "unseen")
"""The two disjoint halves of each kind: one to train policies on, the other to test them on."""

MAX_TABLE_BYTES = GIB // 2
"""Largest table, so that a task for four ranks can be measured on a laptop."""

NUM_VARIED = 4000
VARIED_ROWS = (3, 40_000_000)
VARIED_POOLING_FACTORS = (0.3, 400.0)
"""Ranges of `varied_tables`; values are drawn evenly on a log scale."""

ASSUMED_SHARE, ZIPF_SHARE = 0.5, 0.5
"""The first is the share of tables that keep the assumed profile; the second is the share of the
others that are Zipf-distributed. Rows, widths and numbers of ids decide the cost of tables with
assumed profiles; for the others, policies have to read the profiles."""

ONE_HOT_SHARE = 0.3
"""Share of `varied_tables` that have exactly one id per sample, as Criteo's tables do."""


def paper_tables(half: str) -> Tables:
    """Return one half of `dlrm_datasets_pool`, each table in all `PAPER_DIMS`.

    Args:
        half: one of `HALVES`.
    """
    pool = dlrm_datasets_pool()
    order = np.random.default_rng(0).permutation(len(pool))
    chosen = np.array_split(order, len(HALVES))[HALVES.index(half)]
    return tuple(
        dataclasses.replace(
            pool[i],
            name=f"{pool[i].name}_{dim}",
            num_embeddings=min(pool[i].num_embeddings, MAX_TABLE_BYTES // (4 * dim)),
            embedding_dim=dim,
        )
        for i in chosen.tolist()
        for dim in PAPER_DIMS
    )


def varied_tables(half: str) -> Tables:
    """Return tables over the whole range of real ones, in combinations that no single model has.

    Rows range from three, as in Criteo, to the largest size, and ids per sample from 0.3 to 400. A
    task of such tables has a few that are expensive and many that cost almost nothing.

    Args:
        half: one of `HALVES`.
    """
    rng = np.random.default_rng([1, HALVES.index(half)])
    tables = []
    for i in range(NUM_VARIED):
        dim = int(rng.choice(PAPER_DIMS))
        max_rows = MAX_TABLE_BYTES // (4 * dim)
        low, high = np.log(VARIED_ROWS)
        num_rows = min(round(np.exp(rng.uniform(low, high))), max_rows)
        low, high = np.log(VARIED_POOLING_FACTORS)
        is_one_hot = rng.random() < ONE_HOT_SHARE
        pooling_factor = 1.0 if is_one_hot else float(np.exp(rng.uniform(low, high)))
        tables.append(Table(f"{half}_{i:04d}", num_rows, dim, pooling_factor))
    return tuple(tables)


TABLE_KINDS: dict[str, Callable[[str], Tables]] = {"papers": paper_tables, "varied": varied_tables}
"""Functions that return the tables of one of the `HALVES`, by kind."""


def drawn_accesses(tables: Sequence[Table], half: str) -> dict[str, AccessPattern]:
    """Return access patterns by table, for the tables that do not keep the assumed profile.

    Args:
        half: one of `HALVES`.
    """
    rng = np.random.default_rng([2, HALVES.index(half)])
    drawn = {table.name: draw_accesses(rng, ZIPF_SHARE) for table in tables}
    return {name: accesses for name, accesses in drawn.items() if rng.random() >= ASSUMED_SHARE}
