"""Yambda-5b from files: histories of a user's events, cut by kind, and a listen as candidate."""

import numpy as np
import polars as pl
import pytest

from dlrm_sharded.datasets.yambda import YambdaDataset
from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.testing import check_dataset

KINDS = ("listen", "listen", "listen", "like", "dislike")
NUM_USERS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of 20 users with 100 to 119 events; odd users have skipped what they listened to."""
    path = tmp_path_factory.mktemp("yambda")
    (path / "sequential" / "50m").mkdir(parents=True)
    rng, rows = np.random.default_rng(0), []
    for uid in range(1, NUM_USERS + 1):
        kinds = [KINDS[i % 5] for i in range(99 + uid)]
        percent = 10 if uid % 2 else 90
        rows.append(
            {
                "uid": uid,
                "timestamp": [3600 * i for i in range(len(kinds))],
                "item_id": rng.integers(1, 1000, size=len(kinds)).tolist(),
                "is_organic": [1] * len(kinds),
                "played_ratio_pct": [percent if kind == "listen" else None for kind in kinds],
                "event_type": kinds,
            }
        )
    pl.DataFrame(rows).write_parquet(path / "sequential" / "50m" / "multi_event.parquet")
    for kind, divisor in (("artist", 10), ("album", 5)):
        items = np.arange(1, 1000)
        frame = pl.DataFrame({f"{kind}_id": items // divisor, "item_id": items})
        frame.write_parquet(path / f"{kind}_item_mapping.parquet")
    return path


def dataset(folder, **keys):
    return YambdaDataset(**({"batch_size": 32, "path": str(folder), "size": "50m"} | keys))


def test_conforms(folder):
    check_dataset(lambda: dataset(folder, history=30), world_sizes=(1, 2, 4))
    assert dataset(folder).num_batches("train") == 18 * 16 // 32
    assert dataset(folder).num_batches("val") == 1


def test_a_history_is_the_last_events_of_each_kind_in_the_order_of_time(folder):
    data = dataset(folder, history=30, batch_size=16)
    events = pl.read_parquet(folder / "sequential" / "50m" / "multi_event.parquet")
    for user in (0, 1):
        ids = data.sample_ids("train", 16 * user, 16)
        row = events.row(user, named=True)
        found, lengths = ids["item_id"]
        assert (lengths <= 21).all()  # 10 listens of one kind, 10 likes and the candidate
        sample = found[: lengths[0]]
        candidates = [
            event
            for event, kind in enumerate(row["event_type"])
            if kind == "listen" and row["item_id"][event] == sample[-1]
        ]
        histories = []
        for event in candidates:
            kept = [
                [i for i in range(event) if row["event_type"][i] == kind][-10:]
                for kind in ("listen", "like")
            ]
            histories.append([row["item_id"][i] for i in sorted(kept[0] + kept[1])])
        assert sample[:-1].tolist() in histories
        assert set(ids["uid"][0]) == {user + 1}
        assert (ids["artist_id"][0] == found // 10).all()
        assert (ids["album_id"][0] == found // 5).all()
        assert len(set(ids["user_x_is_organic"][0])) == 1
        assert len(set(ids["user_x_hour"][0])) > 8
    # a part of a user's samples are those of the whole
    part = data.sample_ids("train", 5, 4)["uid"][0]
    assert part.tolist() == [1] * 4


def test_profiles_are_measured_on_files(folder):
    measured = {table.name: table for table in dataset(folder, history=30).tables}
    assert measured["item_id"].pooling_factor < 22
    assert measured["uid"].reuse_histogram[4] == 1.0  # 16 samples of each user


def test_statistics_have_no_batches_and_files_must_be_there(tmp_path):
    data = YambdaDataset(batch_size=64)
    assert (data.num_batches("train"), data.num_batches("val")) == (0, 0)
    with pytest.raises(DataError, match=r"multi_event.parquet is not there; .* plan from stat"):
        dataset(tmp_path)
    with pytest.raises(ConfigError, match=r"data.history is 2"):
        YambdaDataset(batch_size=64, history=2)
