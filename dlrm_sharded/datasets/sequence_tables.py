"""Tables of DLRMv3 and DLRMv4 (HSTU), which look up histories of users, as their code publishes.

All tables are sequences of one `EmbeddingCollection`. The facts are from the folder
`generative_recommenders/dlrm_v3` of two repositories: meta-recsys/generative-recommenders
(`configs.py`, `streaming_synthetic_data.py`, `utils.py`) and mlcommons/training, there under
`recommendation_v4` (`configs.py`, `train/utils.py`, `train/gin/streaming_100b.gin`,
`train/gin/yambda_5b.gin`), with its README.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from dlrm_sharded.accesses.distribution import AccessDistribution
from dlrm_sharded.accesses.zipf import cached_zipf
from dlrm_sharded.datasets.presets import Tables
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table

EMBEDDING_DIM = 512

NUM_ITEMS, NUM_CATEGORIES, NUM_USERS, USER_ROWS = 1_000_000_000, 128, 5_000_000, 10_000_000
NUM_TIMESTAMPS, TRAIN_TIMESTAMPS = 100, 90
SESSION_IDS, SESSION_SHARE, NUM_CANDIDATES = 100, 0.7, 32
"""The generator of `streaming-100b`: a user has a session of 100 items on average at 70 % of the
timestamps, and one before the first. A sample's history is all of the user's earlier sessions; its
candidates are 32 items of the session of its timestamp."""

SAMPLES_PER_USER = 16
"""Samples of one user that follow each other: DLRMv4 trains day by day and, within a day, user by
user, and 4.76 G events of 1.00 M users in 300 days are 16 for each user and day."""

YAMBDA_HISTORY = 2300.0
"""Mean ids of a history: a rank's exchange of 14.5 GB in fp32 at 1,024 samples (`train/utils.py`)
gives this number. Users with log-normal activity of median 2,695 and mean 4,763 events, cut to the
last 1,362 events of each of the kinds played (61.3 %), skipped (35.9 %) and liked (1.9 %), would
have 2,090."""

YAMBDA_ROWS = {"item_id": 9_390_624, "artist_id": 1_293_395, "album_id": 3_367_692}
YAMBDA_USERS = 1_000_001
YAMBDA_CROSSES = {
    "user_x_artist": (("uid", "artist_id"), 100_000_000),
    "user_x_album": (("uid", "album_id"), 40_000_000),
    "user_x_hour": (("uid", "hour"), 24_000_000),
    "item_x_hour": (("item_id", "hour"), 40_000_000),
    "artist_x_hour": (("artist_id", "hour"), 32_000_000),
    "user_x_is_organic": (("uid", "is_organic"), 2_000_000),
    "user_x_artist_x_hour": (("uid", "artist_id", "hour"), 40_000_000),
}
"""Hashed combinations of a candidate's values, of which a sample has one each, and their rows."""


def streaming_tables(timestamp: float) -> Tables:
    """Return the three tables of DLRMv3's streaming set, 1.03 TB in fp16, without a profile.

    Args:
        timestamp: decides the length of histories, 100 ids at 0 and 6,330 at 89.
    """
    sequence = SESSION_IDS * (1.0 + SESSION_SHARE * timestamp) + NUM_CANDIDATES
    return (
        _sequence("item_id", NUM_ITEMS, sequence, "fp16", num_features=2),
        _sequence("item_category_id", NUM_CATEGORIES, sequence, "fp16", num_features=2),
        _sequence("user_id", USER_ROWS, 1.0, "fp16"),
    )


def profiled_streaming_tables(timestamp: int, *, batch_size: int) -> Tables:
    """Return the tables with the expected profile of a global batch at a timestamp."""
    items, categories, users = streaming_tables(timestamp)
    uniform = {categories.name: NUM_CATEGORIES, users.name: NUM_USERS}
    accesses = {name: cached_zipf(rows, 0.0) for name, rows in uniform.items()}
    accesses[items.name] = item_accesses(timestamp)  # type: ignore[assignment]
    return tuple(
        dataclasses.replace(
            table,
            reuse_histogram=accesses[table.name].expected_reuse_histogram(
                batch_size * table.pooling_factor
            ),
        )
        for table in (items, categories, users)
    )


def item_accesses(timestamp: int) -> AccessDistribution:
    """Return the popularity of items in the samples of a timestamp.

    One hundredth of the items appears at each timestamp, and a session chooses evenly from those
    that are there. So the older an item, the more histories have it, and popularity drifts.
    """
    mass = np.full(timestamp + 1, NUM_CANDIDATES / (timestamp + 1))
    mass[0] += SESSION_IDS
    for session in range(timestamp):
        mass[: session + 1] += SESSION_SHARE * SESSION_IDS / (session + 1)
    edges = np.arange(timestamp + 2, dtype=np.float64) * (NUM_ITEMS / NUM_TIMESTAMPS)
    return AccessDistribution(edges, mass)


def yambda_tables(*, crosses: bool = True, history: float = YAMBDA_HISTORY) -> Tables:
    """Return DLRMv4's tables for Yambda-5b in fp32, without a profile.

    Args:
        crosses: whether the seven tables of hashed combinations are there: 569 GB beside 31 GB.
        history: mean ids of a sample's history.
    """
    sequences = [
        _sequence(name, rows, history + 1.0, "fp32", num_features=2)
        for name, rows in YAMBDA_ROWS.items()
    ]
    hashed = YAMBDA_CROSSES if crosses else {}
    others = {"uid": YAMBDA_USERS} | {name: rows for name, (_, rows) in hashed.items()}
    return (*sequences, *(_sequence(name, rows, 1.0, "fp32") for name, rows in others.items()))


def profiled_yambda_tables(
    *,
    batch_size: int,
    crosses: bool = True,
    history: float = YAMBDA_HISTORY,
    alpha: float = 0.9,
    samples_per_user: int = SAMPLES_PER_USER,
) -> Tables:
    """Return the tables with the expected profile of a global batch.

    The samples of a user share nearly all of the history, so that each id of it is used
    `samples_per_user` times as often as in histories of different users.

    Args:
        alpha: Zipf exponent of items, artists and albums. The sources do not publish it.
    """
    num_users = batch_size / samples_per_user
    shared = round(np.log2(samples_per_user))  # reuse bins double from one to the next

    def profiled(table: Table) -> Table:
        keys = YAMBDA_CROSSES.get(table.name, ((table.name,), 0))[0]
        accesses = cached_zipf(table.num_embeddings, 0.0 if "uid" in keys else alpha)
        if table.name in YAMBDA_ROWS or table.name in ("uid", "user_x_is_organic"):
            histogram = accesses.expected_reuse_histogram(num_users * table.pooling_factor)
            return dataclasses.replace(table, reuse_histogram=_shifted(histogram, shared))
        histogram = accesses.expected_reuse_histogram(batch_size)
        return dataclasses.replace(table, reuse_histogram=histogram)

    return tuple(map(profiled, yambda_tables(crosses=crosses, history=history)))


def _shifted(histogram: Iterable[float], num_bins: int) -> tuple[float, ...]:
    """Return the histogram of ids that are used 2 ** num_bins times as often."""
    bins = np.array([*np.zeros(num_bins), *histogram])
    return (*bins[: NUM_REUSE_BINS - 1].tolist(), float(bins[NUM_REUSE_BINS - 1 :].sum()))


def _sequence(name: str, rows: int, ids: float, precision: str, *, num_features: int = 1) -> Table:
    return Table(
        name,
        rows,
        EMBEDDING_DIM,
        ids,
        precision=precision,
        num_features=num_features,
        pooled=False,
    )
