"""What may be averaged is averaged, and everything that was started is counted."""

import csv
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dlrm_sharded.runs.comparison import Comparison, Row, summarize
from dlrm_sharded.runs.comparison_text import comparison_markdown, short_table
from dlrm_sharded.runs.result import Platform, RunResult, Setting
from dlrm_sharded.runs.run_folder import SUCCEEDED, Run, read_run
from dlrm_sharded.runs.run_tables import GAIN, PREDICTION_ERROR

CPU = Platform(world_size=2, device="cpu: test", versions=(("torch", "2.13.0"),))
GPU = Platform(world_size=8, device="H100", versions=(("torch", "2.13.0"),))


def run_of(sharder: str, seed: int | None, *, sweep: str = "sweep", **changes: Any) -> Run:
    fields = {"options": (), "setting": (), "state": "failed", "reason": None, "log": None}
    fields |= {"seconds": None, "platform": None, "result": None}
    return Run(
        name=f"{sweep}/{sharder}_{seed}",
        folder=Path(sweep) / f"{sharder}_{seed}",
        sweep=Path(sweep),
        sharder=sharder,
        seed=seed,
        **fields | changes,
    )


def ran(
    sharder: str = "dim",
    seed: int | None = 0,
    *,
    setting: Setting = (),
    options: Setting = (),
    platform: Platform = CPU,
    sweep: str = "sweep",
    **metrics: Any,
) -> Run:
    """A run that succeeded."""
    result = RunResult(
        sharder=sharder,
        seed=seed,
        batch_size=64,
        commit="0123456789abcdef",
        world_size=platform.world_size,
        device=platform.device,
        versions=dict(platform.versions),
        **metrics,
    )
    said = {"setting": setting, "options": options, "platform": platform, "result": result}
    said["costs"] = result.costs
    return run_of(sharder, seed, sweep=sweep, state=SUCCEEDED, **said)


def failed(sharder: str = "dim", seed: int = 0, **changes: Any) -> Run:
    return run_of(sharder, seed, **changes)


def only_row(comparison: Comparison, sharder: str) -> Row:
    (row,) = [row for row in comparison.rows if row.sharder == sharder]
    return row


def cells(comparison: Comparison, *, table: int = 0) -> list[list[str]]:
    """Of one of the Markdown tables, with its titles."""
    parts = comparison_markdown(comparison).split("\n\n")
    tables = [part for part in parts if part.startswith("| ")]
    lines = [line for line in tables[table].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def csv_rows(frame: pl.DataFrame) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(frame.write_csv())))


def test_runs_of_our_search_in_02_are_not_those_of_the_published_method():
    folder = Path(__file__).parents[2] / "fixtures" / "0.2" / "run"
    old = read_run(folder, root=folder.parent, sweep=folder.parent, job={"state": SUCCEEDED})
    new = ran("neuroshard", costs="learned")
    assert old.sharder == "search (0.2)"
    labels = {row.sharder for row in summarize([old, new]).rows}
    assert labels == {"search (0.2)", "neuroshard (costs: learned)"}


def test_rows_name_costs_and_average_no_different_ones():
    runs = [ran("autoshard", seed, costs="its own") for seed in (0, 1)]
    runs += [ran("autoshard", costs="this hardware's"), ran("search", costs="learned")]
    comparison = summarize([*runs, failed("search", 1)])
    found = {row.sharder: len(row.runs) for row in comparison.rows}
    assert found == {
        "autoshard (costs: its own)": 2,
        "autoshard (costs: this hardware's)": 1,
        "search (costs: learned)": 2,
    }


def test_mean_deviation_and_count():
    costs = [10.0, 12.0, 17.0]
    comparison = summarize([ran(seed=i, embedding_cost_ms=x) for i, x in enumerate(costs)])
    spread = only_row(comparison, "dim").figures["embedding_cost_ms"]
    assert (spread.mean, spread.std, spread.n) == pytest.approx((13.0, np.std(costs, ddof=1), 3))
    (row,) = comparison.summary.to_dicts()
    assert row["embedding_cost_ms_mean"] == pytest.approx(13.0)
    assert row["embedding_cost_ms_n"] == row["runs"] == row["succeeded"] == row["seeds"] == 3


def test_one_run_has_no_deviation():
    comparison = summarize([ran(embedding_cost_ms=10.0)])
    assert only_row(comparison, "dim").figures["embedding_cost_ms"].std is None
    assert cells(comparison)[1][:2] == ["dim", "10.00"]


def test_failures_are_counted_and_told():
    comparison = summarize(
        [
            *(ran(seed=seed, embedding_cost_ms=10.0 + seed) for seed in range(3)),
            failed(seed=3, reason="a | b\nof *c*", log="sweep/log"),
            failed("size", state="cancelled"),
        ]
    )
    text = comparison_markdown(comparison)
    titles, dim, size = cells(comparison)
    assert (dim[0], dim[1], dim[-1]) == ("dim", "11.00 ± 1.00", "3 / 4")
    assert size == ["size", *["-"] * (len(titles) - 2), "0 / 1"]
    assert r"- sweep/dim_3: failed: a \| b of \*c\* (log: sweep/log)" in text.splitlines()
    assert "- sweep/size_0: cancelled: no reason known (no log)" in text.splitlines()
    assert "5 runs, 3 succeeded; 4 seeds (0, 1, 2, 3)" in text
    short = short_table(comparison)
    assert "sweep/dim_3: failed: a | b of *c* (log: sweep/log)" in short.splitlines()


def test_a_figure_that_some_runs_lack_says_so():
    """Else a mean over two would pass for one over three."""
    runs = [ran(seed=0, samples_per_s=10.0), ran(seed=1, samples_per_s=20.0), ran(seed=2)]
    comparison = summarize(runs)
    row = dict(zip(*cells(comparison), strict=True))
    assert row["samples/s"] == "15 ± 7 (2 of 3)"
    assert row["runs"] == "3 / 3"


def test_gains_are_paired_by_seed():
    throughputs = {"random": [100.0, 200.0], "dim": [110.0, 260.0, 900.0]}
    runs = [
        ran(sharder, seed, samples_per_s=x)
        for sharder, values in throughputs.items()
        for seed, x in enumerate(values)
    ]
    comparison = summarize([*runs, ran("size", 2, samples_per_s=900.0)])
    assert only_row(comparison, "dim").figures[GAIN].mean == pytest.approx(0.2)
    assert only_row(comparison, "dim").figures[GAIN].n == 2
    assert GAIN not in only_row(comparison, "size").figures
    assert GAIN not in only_row(comparison, "random").figures
    titles, *rows = cells(comparison)
    gains = {row[0]: row[titles.index("x random (95 %)")] for row in rows}
    assert gains == {"random": "-", "dim": "1.196 (2 pairs)", "size": "-"}


@pytest.mark.parametrize(
    "other",
    [
        ran("random", 0, setting=(("batch_size", "64"),), samples_per_s=50.0),
        ran("random", 0, platform=GPU, samples_per_s=50.0),
        ran("random", 0, platform=Platform(world_size=3, device="cpu: test"), samples_per_s=50.0),
        ran("random", 1, samples_per_s=50.0),
        ran("random", 0, options=(("seed", "7"),), samples_per_s=50.0),
        ran("random", None, samples_per_s=50.0),
        ran("random", 0, samples_per_s=0.0),
        failed("random"),
    ],
    ids=["setting", "device", "ranks", "seed", "options", "no_seed", "no_throughput", "failed"],
)
def test_gains_are_against_the_same_conditions_only(other):
    runs = [other, ran("dim", 0, samples_per_s=100.0), ran("dim", None, samples_per_s=100.0)]
    assert GAIN not in only_row(summarize(runs), "dim").figures
    pair = ran("random", 0, samples_per_s=80.0, sweep="earlier")
    gain = only_row(summarize([*runs, pair]), "dim").figures[GAIN]
    assert (gain.mean, gain.n) == pytest.approx((0.25, 1))


@pytest.mark.parametrize(
    ("other", "conditions"),
    [
        ({"setting": (("batch_size", "128"), ("x", "1"))}, {"setting": "batch_size=128"}),
        ({"platform": GPU}, {"ranks": "8", "device": "H100"}),
        (
            {"platform": dataclasses.replace(CPU, versions=(("torch", "2.11"),))},
            {"versions": "torch=2.11"},
        ),
    ],
    ids=["setting", "hardware", "versions"],
)
def test_what_differs_is_never_averaged(other, conditions):
    here = {"setting": (("batch_size", "64"), ("x", "1"))}
    comparison = summarize(
        [ran(embedding_cost_ms=10.0, **here), ran(embedding_cost_ms=20.0, **(here | other))]
    )
    assert [row.figures["embedding_cost_ms"].n for row in comparison.rows] == [1, 1]
    (row,) = [row for row in comparison.rows if row.conditions == conditions]
    assert row.figures["embedding_cost_ms"].mean == 20.0
    text = comparison_markdown(comparison)
    assert cells(comparison)[0][: 1 + len(conditions)] == ["sharder", *conditions]
    assert f"runs that differ in {', '.join(conditions)} have rows of their own" in text
    common = "x=1" if "setting" in other else "batch_size=64 x=1"
    assert f"- the same in all: {common}" in text.splitlines()


def test_options_of_a_sharder_make_rows_but_share_the_random_runs():
    comparison = summarize(
        [
            ran("random", samples_per_s=100.0),
            ran("torchrec", samples_per_s=150.0),
            ran("torchrec", options=(("min_partition", "16"),), samples_per_s=120.0),
        ]
    )
    sharders = [row.sharder for row in comparison.rows]
    assert sharders == ["random", "torchrec (min_partition=16)", "torchrec"]  # from the slowest on
    gains = [row.figures[GAIN].mean for row in comparison.rows[1:]]
    assert gains == pytest.approx([0.2, 0.5])


def test_nothing_succeeded():
    comparison = summarize([failed("dim"), failed("size")], ["sweep.json is broken"])
    assert [row[-1] for row in cells(comparison)[1:]] == ["0 / 1", "0 / 1"]
    assert "- sweep.json is broken" in comparison_markdown(comparison).splitlines()
    assert short_table(comparison).splitlines()[-1] == "sweep.json is broken"


def test_prediction_errors():
    """Of each run, then averaged: a cost of twice the time weighs no more."""
    comparison = summarize(
        [
            ran(seed=0, embedding_cost_ms=10.0, predicted_ms=11.0),
            ran(seed=1, embedding_cost_ms=20.0, predicted_ms=16.0),
            ran(seed=2, embedding_cost_ms=20.0),
            ran("size", embedding_cost_ms=0.0, predicted_ms=1.0),
        ]
    )
    error = only_row(comparison, "dim").figures[PREDICTION_ERROR]
    assert (error.mean, error.n) == (pytest.approx(-0.05), 2)
    assert PREDICTION_ERROR not in only_row(comparison, "size").figures
    titles, dim, size = cells(comparison, table=1)
    column = titles.index("prediction, %")
    assert (size[column], dim[column]) == ("-", "-5.0 ± 21.2 (2 of 3)")
    summary = csv_rows(comparison.summary)
    assert [row["prediction_error_n"] for row in summary] == ["2", "0"]
    assert float(summary[0]["prediction_error_mean"]) == pytest.approx(-0.05)


def test_tables_for_programs():
    comparison = summarize(
        [ran(seed=0, setting=(("x", "1"),), loss=0.123456789), failed(seed=1, reason="a,\n'b\"")]
    )
    rows = csv_rows(comparison.table)
    assert [row["state"] for row in rows] == ["failed", SUCCEEDED]
    assert rows[0]["reason"] == "a,\n'b\""
    assert (rows[0]["loss"], rows[1]["loss"]) == ("", "0.123456789")
    assert rows[1]["setting"] == "x=1"
    summary = csv_rows(comparison.summary)
    assert [(row["runs"], row["succeeded"], row["loss_n"]) for row in summary] == [
        ("1", "0", "0"),
        ("1", "1", "1"),
    ]
