"""What may be averaged is averaged, and everything that was started is counted."""

import csv
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dlrm_sharded.runs.comparison import Comparison, Row, summarize
from dlrm_sharded.runs.comparison_text import MAX_LINE, comparison_markdown, short_table
from dlrm_sharded.runs.result import Platform, RunResult, Setting, write_result
from dlrm_sharded.runs.run_folder import SUCCEEDED, Run
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


def test_several_random_runs_of_a_seed_count_as_their_mean():
    runs = [ran("random", 0, sweep=s, samples_per_s=x) for s, x in (("a", 80.0), ("b", 120.0))]
    comparison = summarize([*runs, ran("dim", 0, samples_per_s=150.0)])
    assert only_row(comparison, "dim").figures[GAIN].mean == pytest.approx(0.5)


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


def test_order_of_rows():
    """By setting; then random, then from the highest mean cost to the lowest, the unknown last."""
    small, large = (("batch_size", "256"),), (("batch_size", "1024"),)
    runs = [
        ran("cheap", setting=small, embedding_cost_ms=1.0),
        failed("broken", setting=small),
        ran("another", setting=small),
        ran("random", setting=small, embedding_cost_ms=2.0),
        ran("costly", setting=small, embedding_cost_ms=3.0),
        ran("middle", 1, setting=small, embedding_cost_ms=3.5),
        ran("middle", 0, setting=small, embedding_cost_ms=1.0),
        ran("cheap", setting=large, embedding_cost_ms=9.0),
        ran("costly", setting=large, embedding_cost_ms=8.0),
    ]
    rows = summarize(runs).rows
    small_rows = ["random", "costly", "middle", "cheap", "another", "broken"]
    assert [row.sharder for row in rows] == [*small_rows, "cheap", "costly"]
    assert [row.conditions["setting"] for row in rows[5:7]] == ["batch_size=256", "batch_size=1024"]
    assert [run.seed for run in rows[2].runs] == [0, 1]


@pytest.mark.parametrize("values", [["", "256"], ["1e-3", "0.01", "0.1", "0.10"], ["x", "x1"]])
def test_settings_in_order_of_their_numbers(values):
    settings: list[Setting] = [(("lr", value),) for value in values]
    runs = [ran(name, setting=s) for name in ("dim", "size") for s in reversed(settings)]
    rows = summarize(runs).rows
    assert [row.runs[0].setting for row in rows] == [s for s in settings for _ in range(2)]


def test_runs_without_a_result_join_those_they_were_started_with():
    on_gpu = [ran(seed=0, platform=GPU, sweep="gpu"), failed(seed=1, sweep="gpu")]
    on_cpu = [ran(seed=0, platform=CPU, sweep="cpu"), failed(seed=1, sweep="cpu")]
    elsewhere = [failed(seed=1, sweep="other")]
    rows = summarize([*on_gpu, *on_cpu, *elsewhere]).rows
    assert [(row.conditions["device"], len(row.runs)) for row in rows] == [
        ("unknown", 1),
        ("cpu: test", 2),
        ("H100", 2),
    ]
    (row,) = summarize([*on_cpu, *elsewhere]).rows
    assert (len(row.results), len(row.runs)) == (1, 3)


def test_nothing_succeeded():
    comparison = summarize([failed("dim"), failed("size")], ["sweep.json is broken"])
    assert [row[-1] for row in cells(comparison)[1:]] == ["0 / 1", "0 / 1"]
    assert "- sweep.json is broken" in comparison_markdown(comparison).splitlines()
    assert short_table(comparison).splitlines()[-1] == "sweep.json is broken"


def test_names_cannot_break_the_table():
    nasty = (("data.path", "a|b<c>\\_d_`e`"),)
    plain = (("data.path", "plain"),)
    text = comparison_markdown(summarize([ran(setting=nasty), ran(setting=plain)]))
    assert r"data.path=a\|b&lt;c>\\\_d\_\`e\`" in text
    assert "size_lookup" in comparison_markdown(summarize([ran("size_lookup")]))
    table = text.split("\n\n")[1].splitlines()
    bars = [line.replace("\\\\", "").replace(r"\|", "").count("|") for line in table]
    assert bars == [bars[0]] * 4


def test_commits_that_a_mean_mixes_are_told():
    text = comparison_markdown(summarize([ran(seed=0), ran(seed=1)]))
    assert "- commit: 0123456789ab" in text.splitlines()


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


def test_gaps():
    """A column where any run knows how far from the best possible its plan may be."""
    bounds = [{"gap": 0.01, "lower_bound_ms": 8.0}, {"gap": 0.03, "lower_bound_ms": 9.0}]
    runs = [ran(seed=seed, **bound) for seed, bound in enumerate(bounds)]
    comparison = summarize([*runs, ran("size")])
    titles, dim, size = cells(comparison)
    column = titles.index("gap, %")
    assert (size[column], dim[column]) == ("-", "2.0 ± 1.4")
    assert "Gap is an upper limit" in comparison_markdown(comparison)
    summary = csv_rows(comparison.summary)
    assert [row["gap_n"] for row in summary] == ["2", "0"]
    assert float(summary[0]["lower_bound_ms_mean"]) == pytest.approx(8.5)


def test_what_no_run_knows_has_no_column():
    text = comparison_markdown(summarize([ran(embedding_cost_ms=10.0)])).lower()
    assert "rediction" not in text
    assert "gap" not in text


def test_planning_times_keep_two_digits():
    times = {"a": 0.000362, "b": 0.0, "c": 0.0473, "d": 128.33}
    comparison = summarize([ran(name, plan_solve_s=time) for name, time in times.items()])
    column = cells(comparison)[0].index("planning, s")
    shown = [row[column] for row in cells(comparison)[1:]]
    assert shown == ["0.00036", "0.0", "0.047", "128.3"]


def test_the_terminal_is_not_too_narrow():
    runs: list[Run] = [failed(reason="because " * 50, log="sweep/dim_0/train.log")]
    for i, name in enumerate(["size", "size_lookup", "torchrec_blind", "neuroshard_paper"]):
        figures = {"embedding_cost_ms": 123.0, "imbalance": 1.5, "samples_per_s": 3e6 + i}
        runs += [ran(name, seed, **figures) for seed in (0, 1)]
    *table, failure = short_table(summarize(runs)).splitlines()[:7]
    assert len({len(line) for line in table}) == 1
    assert len(table[0]) <= MAX_LINE
    assert len(failure) == MAX_LINE
    assert failure.startswith("sweep/dim_0: failed: because")
    assert failure.endswith("(log: sweep/dim_0/train.log)")


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


def test_a_locale_without_our_characters(tmp_path):
    """The files are in UTF-8, and what the terminal cannot show is escaped."""
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        write_result(tmp_path / str(seed), ran(seed=seed, embedding_cost_ms=1.0 + seed).result)
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_sharded.commands.report", str(tmp_path)],
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"1.50 \xb1 0.71" in done.stdout
    assert "1.50 ± 0.71" in (tmp_path / "summary.md").read_text(encoding="utf-8")
