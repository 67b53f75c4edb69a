"""Tables to draw tasks from, that policies are trained and tried on: of each kind two halves.

They have no reuse histograms, which depend on the batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from dlrm_sharded.datasets.presets import Tables, dlrm_datasets_pool
from dlrm_sharded.tables import Table
from dlrm_sharded.task import GIB

PARTS = ("training", "unseen")
"""One half to train policies on, one to try them on."""

PAPER_DIMS = (4, 8, 16, 32, 64, 128)

LARGEST_TABLE_BYTES = GIB // 2
"""So that four ranks' tables of a task are measured on a laptop."""

NUM_VARIED = 2000
VARIED_ROWS, VARIED_IDS = (3, 40_000_000), (0.3, 400.0)
SINGLE_ID_SHARE = 0.3
"""Of `varied_tables`: rows, ids a sample, and how many have one id a sample, as Criteo's have."""


def papers_tables(part: str) -> Tables:
    """A half of `dlrm_datasets_pool`, each table in all `PAPER_DIMS`, of at most half a GiB.

    Args:
        part: one of `PARTS`.
    """
    pool = dlrm_datasets_pool()
    order = np.random.default_rng(0).permutation(len(pool))
    half = np.array_split(order, len(PARTS))[PARTS.index(part)]
    return tuple(
        dataclasses.replace(
            pool[i],
            name=f"{pool[i].name}_{dim}",
            num_embeddings=min(pool[i].num_embeddings, LARGEST_TABLE_BYTES // (4 * dim)),
            embedding_dim=dim,
        )
        for i in half.tolist()
        for dim in PAPER_DIMS
    )


def varied_tables(part: str) -> Tables:
    """Tables over the range of real ones, as no one model has them, of at most half a GiB.

    From Criteo's, of three rows, to the largest, one id a sample or hundreds, in all combinations:
    a task of them has few that cost much and many that cost next to nothing.

    Args:
        part: one of `PARTS`; they have nothing in common.
    """
    rng = np.random.default_rng([1, PARTS.index(part)])
    tables = []
    for i in range(NUM_VARIED):
        dim = int(rng.choice(PAPER_DIMS))
        most_rows = LARGEST_TABLE_BYTES // (4 * dim)
        low, high = np.log(VARIED_ROWS)
        num_rows = min(round(np.exp(rng.uniform(low, high))), most_rows)
        low, high = np.log(VARIED_IDS)
        ids = 1.0 if rng.random() < SINGLE_ID_SHARE else float(np.exp(rng.uniform(low, high)))
        tables.append(Table(f"v{i:04d}", num_rows, dim, ids))
    return tuple(tables)


TABLES: dict[str, Callable[[str], Tables]] = {"papers": papers_tables, "varied": varied_tables}
"""By kind, of a part: to draw tasks from that policies are trained and tried on."""
