"""Tables of made-up entries, as csv and as parquet."""

import polars as pl
import pytest

from dlrm_sharded.contest.entry import Measurement
from dlrm_sharded.contest.tables import by_plan, by_rank, by_shard, by_task, write_tables
from tests.unit.contest.entries import cost_of, entry_of

ENTRIES = [
    entry_of("t0", "a", 2.0, lower_bound_ms=1.6),
    entry_of("t0", "b", 4.0),
    entry_of("t1", "a", None),
    entry_of("t1", "b", None),
]


def test_by_task():
    rows = by_task(by_plan(ENTRIES, {}, "a")).to_dicts()
    assert [row["task"] for row in rows] == ["t0", "t1"]
    assert (rows[0]["best_sharder"], rows[0]["best_ms"], rows[0]["num_plans"]) == ("a", 2.0, 2)
    assert rows[0]["lower_bound_ms"] == 1.6
    assert (rows[1]["best_sharder"], rows[1]["num_plans"]) == (None, 0)


def test_by_plan_has_the_diagnosis_in_short():
    rows = by_plan(ENTRIES, {}, "a").to_dicts()
    assert rows[1]["over_reference"] == 2.0
    assert rows[1]["gap"] == pytest.approx(1.5)
    assert (rows[1]["slowest_rank"], rows[1]["dominant_stage"]) == (1, "lookups")
    assert rows[1]["dominant_ms"] == 3.0
    assert rows[1]["costliest_tables"] == "y 3 ms, x 1.5 ms"
    assert rows[2]["error"] == "no room"
    assert {rows[2][key] for key in ("cost_ms", "gap", "slowest_rank")} == {None}


def test_measured_figures_stand_beside_predicted_ones():
    rounds = {"a": (1.0,) * 6, "b": (3.0,) * 6}
    measured = {"t0": Measurement(rounds, {"a": cost_of(0.5, 1.0), "b": cost_of(1.5, 3.0)})}
    row = by_plan(ENTRIES, measured, "a").row(1, named=True)
    assert (row["measured_ms"], row["measured_over_reference"]) == (3.0, pytest.approx(3.0))
    assert row["cost_ms"] == 4.0
    assert by_rank(ENTRIES, measured)["measured_fwd_compute_ms"][3] == 2.25


def test_by_rank_and_by_shard():
    ranks, shards = by_rank(ENTRIES, {}).to_dicts(), by_shard(ENTRIES).to_dicts()
    assert [(row["sharder"], row["rank"], row["total_ms"]) for row in ranks] == [
        *(("a", 0, 1.0), ("a", 1, 2.0), ("b", 0, 2.0), ("b", 1, 4.0)),
    ]
    assert ranks[1]["bwd_comm_ms"] == 0.5
    assert [row["memory_bytes"] for row in ranks] == [144, 432] * 2
    assert [(row["table"], row["end_col"], row["compute_ms"]) for row in shards[:2]] == [
        *(("x", 4, 1.0), ("y", 8, 2.0)),
    ]


def test_shards_of_a_model_that_is_not_additive_have_no_times():
    entry = entry_of("t", "a", 1.0, shard_ms=())
    assert by_shard([entry])["compute_ms"].to_list() == [None] * 3
    assert by_plan([entry], {}, "a")["costliest_tables"].to_list() == [""]


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_files(tmp_path, file_format):
    plans = by_plan(ENTRIES, {}, "a")
    names = write_tables(plans, ENTRIES, {}, tmp_path, file_format=file_format)
    read = pl.read_csv if file_format == "csv" else pl.read_parquet
    assert [read(tmp_path / name).height for name in names] == [2, 4, 4, 6]
