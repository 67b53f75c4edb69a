"""Tables of synthetic entries, as csv and as parquet."""

from pathlib import Path

import polars as pl
import pytest

from dlrm_sharded.contest.cases import Measurement, Setting
from dlrm_sharded.contest.scores import by_plan, write_tables
from tests.unit.contest.entries import cost_of, entry_of

ENTRIES = [
    entry_of("t0", "a", 2.0, lower_bound_ms=1.6),
    entry_of("t0", "b", 4.0),
    entry_of("t1", "a", None),
    entry_of("t1", "b", None),
]


def written(out, entries=ENTRIES, measured=None, file_format="parquet"):
    setting = Setting(Path(out), "a", 1e-3, 1, 9.0, file_format)
    plans = by_plan(entries, measured or {}, "a")
    names = write_tables(plans, entries, measured or {}, setting)
    read = pl.read_csv if file_format == "csv" else pl.read_parquet
    return [read(out / name) for name in names]


def test_rows_of_plans():
    rows = by_plan(ENTRIES, {}, "a").to_dicts()
    assert rows[1]["over_reference"] == 2.0
    assert rows[1]["gap"] == pytest.approx(1.5)
    assert (rows[1]["slowest_rank"], rows[1]["num_shards"]) == (1, 3)
    assert rows[2]["error"] == "no memory"
    assert {rows[2][key] for key in ("cost_ms", "gap", "slowest_rank")} == {None}


def test_measured_figures_stand_beside_predicted_ones(tmp_path):
    rounds = {"a": (1.0,) * 6, "b": (3.0,) * 6}
    measured = {"t0": Measurement(rounds, {"a": cost_of(0.5, 1.0), "b": cost_of(1.5, 3.0)})}
    plans, ranks = written(tmp_path, measured=measured)
    row = plans.row(1, named=True)
    assert (row["measured_ms"], row["measured_over_reference"]) == (3.0, pytest.approx(3.0))
    assert row["cost_ms"] == 4.0
    assert ranks["measured_fwd_compute_ms"][3] == 2.25


@pytest.mark.parametrize("file_format", ["csv", "parquet"])
def test_rows_of_ranks(tmp_path, file_format):
    plans, ranks = (frame.to_dicts() for frame in written(tmp_path, file_format=file_format))
    assert [len(plans), len(ranks)] == [4, 4]
    assert [(row["sharder"], row["rank"], row["total_ms"]) for row in ranks] == [
        *(("a", 0, 1.0), ("a", 1, 2.0), ("b", 0, 2.0), ("b", 1, 4.0))
    ]
    assert ranks[1]["bwd_comm_ms"] == 0.5
    assert [row["memory_bytes"] for row in ranks] == [144, 432] * 2
