"""Yambda-5b as DLRMv4 trains on it: from the files of yandex/yambda, or as statistics alone.

Samples are those of `dlrm_v3/datasets/yambda.py` in mlcommons/training (recommendation_v4): each is
a listen. Its history is the user's last events before it of each kind (played, skipped, liked), in
the order of time, and its candidate is what was listened to. What differs: a user has one run of
samples in an epoch, where the reference goes through 300 days, and hashes are others.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from dlrm_sharded.datasets.base import Split, reuse_histogram
from dlrm_sharded.datasets.counter_random import random_bits, stream_key, uniforms
from dlrm_sharded.datasets.sequence_tables import (
    SAMPLES_PER_USER,
    YAMBDA_CROSSES,
    YAMBDA_HISTORY,
    YAMBDA_ROWS,
    profiled_yambda_tables,
    yambda_tables,
)
from dlrm_sharded.datasets.sequences import SampleIds, SequenceDataset
from dlrm_sharded.files.errors import DataError, check_count, check_flag, check_number
from dlrm_sharded.plans.tables import Table

SIZES = ("5b", "500m", "50m")
TRAIN_SHARE = 0.9
"""Share of the users whose samples are for training, as published."""

PLAYED_PERCENT = 50
"""A listen of less than this part of a track is a skip."""

EVENT_COLUMNS = ("uid", "timestamp", "item_id", "is_organic", "played_ratio_pct", "event_type")

Ints = NDArray[np.int64]


class YambdaDataset(SequenceDataset):
    """Batches of consecutive listens, user by user; without files there are tables, and no batches.

    Args:
        path: folder with `sequential/SIZE/multi_event.parquet`, `artist_item_mapping.parquet` and
            `album_item_mapping.parquet`, as downloaded; None for statistics alone.
        size: 5b, 500m or 50m; the tables are those of 5b.
        crosses: whether the seven tables of hashed combinations are there.
        history: largest number of ids of a history, a third of it for each kind of events.
        mean_history, alpha: mean ids of a history and Zipf exponent of the items; of statistics.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        path: str | None = None,
        size: str = "5b",
        crosses: bool = True,
        history: int = 4086,
        mean_history: float = YAMBDA_HISTORY,
        alpha: float = 0.9,
        seed: int = 0,
    ) -> None:
        check_count("batch_size", batch_size, least=1)
        check_count("data.history", history, least=3)
        check_number("data.mean_history", mean_history)
        check_number("data.alpha", alpha)
        check_flag("data.crosses", crosses)
        tables = yambda_tables(crosses=crosses)
        counts: dict[Split, int] = {"train": 0, "val": 0}
        self._cap, self._seed = history // 3, seed
        if path is not None:
            self._events, mappings = _found_files(Path(path), size)
            self._of_item = {name: _mapping(file, name) for name, file in mappings.items()}
            num_users = pl.scan_parquet(self._events).select(pl.len()).collect().item()
            self._num_train_users = int(num_users * TRAIN_SHARE)
            users = {"train": self._num_train_users, "val": num_users - self._num_train_users}
            counts = {split: n * SAMPLES_PER_USER // batch_size for split, n in users.items()}  # type: ignore[misc]
        super().__init__(tables, batch_size, counts, seed)
        self.tables = profiled_yambda_tables(
            batch_size=batch_size, crosses=crosses, history=mean_history, alpha=alpha
        )
        if counts["train"]:
            self.tables = self._measured(tables)

    def sample_ids(self, split: Split, first: int, num_samples: int) -> SampleIds:
        first_user, last_user = (n // SAMPLES_PER_USER for n in (first, first + num_samples - 1))
        offset = 0 if split == "train" else self._num_train_users
        rows = (
            pl.scan_parquet(self._events)
            .select(EVENT_COLUMNS)
            .slice(offset + first_user, last_user - first_user + 1)
            .collect()
        )
        samples: list[tuple[Ints, dict[str, int]]] = []
        for user, row in enumerate(rows.iter_rows(named=True), start=first_user):
            samples += self._of_user(row, offset + user)
        begin = first - first_user * SAMPLES_PER_USER
        samples = samples[begin : begin + num_samples]
        items = np.concatenate([items for items, _ in samples])
        lengths = np.array([len(items) for items, _ in samples])
        ids: SampleIds = {"item_id": (items, lengths)}
        for name, of_item in self._of_item.items():
            ids[name] = (of_item[np.minimum(items, len(of_item) - 1)], lengths)
        last = np.cumsum(lengths) - 1
        values = {name: column[last] for name, (column, _) in ids.items()} | {
            key: np.array([context[key] for _, context in samples])
            for key in ("uid", "hour", "is_organic")
        }
        ones = np.ones(num_samples, dtype=np.int64)
        ids["uid"] = (values["uid"], ones)
        for name, (keys, num_rows) in YAMBDA_CROSSES.items():
            bits = np.zeros(num_samples, dtype=np.uint64)
            for key in keys:
                bits = random_bits(stream_key(name, key), bits + values[key].astype(np.uint64))
            ids[name] = ((bits % np.uint64(num_rows)).astype(np.int64), ones)
        return ids

    def _of_user(self, row: dict[str, Any], user: int) -> list[tuple[Ints, dict[str, int]]]:
        """Return a user's samples: the items of each with the candidate last, and its context."""
        items, seconds = np.array(row["item_id"]), np.array(row["timestamp"])
        is_listen = np.array(row["event_type"]) == "listen"
        played = np.array(row["played_ratio_pct"], dtype=np.float64) >= PLAYED_PERCENT
        kinds = (is_listen & played, is_listen & ~played, np.array(row["event_type"]) == "like")
        pools = [np.flatnonzero(kind) for kind in kinds]
        listens = np.flatnonzero(is_listen) if is_listen.any() else np.arange(len(items))
        where = uniforms(stream_key(self._seed, "listen"), np.array([user], dtype=np.uint64))[0]
        chosen = int(where * len(listens)) - np.arange(SAMPLES_PER_USER)[::-1]
        samples = []
        for event in listens[np.maximum(chosen, 0)]:
            ends = [int(np.searchsorted(pool, event)) for pool in pools]
            kept = [
                pool[max(0, end - self._cap) : end] for pool, end in zip(pools, ends, strict=True)
            ]
            history = np.sort(np.concatenate(kept))
            context = {
                "uid": int(row["uid"]),
                "hour": int(seconds[event]) // 3600 % 24,
                "is_organic": int(row["is_organic"][event]),
            }
            samples.append((items[np.append(history, event)].astype(np.int64), context))
        return samples

    def _measured(self, tables: tuple[Table, ...]) -> tuple[Table, ...]:
        """Return the tables with the profile of the first batch."""
        found = self.sample_ids("train", 0, self.batch_size)
        return tuple(
            dataclasses.replace(
                table,
                pooling_factor=len(found[table.name][0]) / self.batch_size,
                reuse_histogram=reuse_histogram(torch.from_numpy(found[table.name][0])),
            )
            for table in tables
        )


def _found_files(path: Path, size: str) -> tuple[Path, dict[str, Path]]:
    """Return the file of events and those of the items' artists and albums.

    Raises:
        DataError: one of them is missing.
    """
    events = path / "sequential" / size / "multi_event.parquet"
    mappings = {f"{kind}_id": path / f"{kind}_item_mapping.parquet" for kind in ("artist", "album")}
    for file in (events, *mappings.values()):
        if not file.is_file():
            raise DataError(
                f"{file} is not there; data.path must have the files of yandex/yambda (Hugging "
                f"Face), and data.size is {size!r}, one of {', '.join(SIZES)}. Leave data.path out "
                "to plan from statistics"
            )
    return events, mappings


def _mapping(file: Path, name: str) -> Ints:
    """Return [items], the artist or album of each item; 0 for items that have none."""
    frame = pl.read_parquet(file, columns=["item_id", name])
    of_item = np.zeros(YAMBDA_ROWS["item_id"], dtype=np.int64)
    of_item[frame["item_id"].to_numpy()] = frame[name].to_numpy()
    return of_item
