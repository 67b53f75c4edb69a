"""What may be averaged is averaged, and everything that was started is counted."""

import csv
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.plan_cost import StageCost
from dlrm_sharded.runs.comparison import Comparison, Row, summarize
from dlrm_sharded.runs.comparison_figures import comparison_figures
from dlrm_sharded.runs.comparison_text import comparison_markdown, short_table
from dlrm_sharded.runs.result import RunResult
from dlrm_sharded.runs.rounds import rounds_file
from dlrm_sharded.runs.run_folder import SUCCEEDED, Job, Run, read_run
from tests.unit.runs.test_comparison_figures import ends
from tests.unit.runs.test_rounds import ROUND


def run_of(sharder: str, seed: int | None = 0, *, sweep: str = "sweep", **changes: Any) -> Run:
    """A run that failed."""
    fields = {"options": "", "setting": "", "state": "failed", "reason": None, "log": None}
    fields |= {"seconds": None, "result": None}
    return Run(
        name=f"{sweep}/{sharder}_{seed} {changes.get('options')} {changes.get('setting')}",
        folder=Path(sweep) / f"{sharder}_{seed}{changes.get('options')}",
        sweep=Path(sweep),
        sharder=sharder,
        seed=seed,
        **fields | changes,
    )


def ran(sharder: str = "dim", seed: int | None = 0, **changes: Any) -> Run:
    """A run that succeeded."""
    of_run = {key: changes.pop(key) for key in ("setting", "options", "sweep") if key in changes}
    fields = {
        "device": "cpu: test",
        "world_size": 2,
        "ranks_per_host": 2,
        "versions": {"torch": "2.13.0"},
    }
    result = RunResult(batch_size=64, commit="0123456789abcdef", **fields | changes)
    return run_of(sharder, seed, state=SUCCEEDED, result=result, **of_run)


def row_of(comparison: Comparison, label: str) -> Row:
    (row,) = [row for row in comparison.rows if row.label == label]
    return row


def cells(comparison: Comparison, *, table: int = 0) -> dict[str, dict[str, str]]:
    """The cells of one of the Markdown tables, by sharder and title."""
    parts = comparison_markdown(comparison).split("\n\n")
    tables = [part for part in parts if part.startswith("| ")]
    lines = [line for line in tables[table].splitlines() if line.startswith("| ")]
    titles, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def csv_rows(frame: pl.DataFrame) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(frame.write_csv())))


def in_rounds(folder: Path, sharder: str, speeds: list[float], **changes: Any) -> Run:
    """A run that rounds have measured at these speeds, after a training that was slower."""
    training = {"samples_per_s": 1.0, "step_ms": 9.0, "embedding_cost_ms": 40.0}
    training["per_rank"] = (StageCost(10.0, 10.0, 10.0, 10.0),)
    run = ran(sharder, sweep=str(folder), **training, predicted_ms=12.0, **changes)
    run.folder.mkdir(parents=True)
    write_json(run.folder / "plan.json", {"shards": [sharder]})
    for number, speed in enumerate(speeds):
        fields = {**dataclasses.asdict(ROUND), "round": number, "samples_per_s": speed}
        rounds_file(run.folder).append({**fields, "embedding_cost_ms": 1000 / speed})
    return run


def test_runs_of_our_search_in_02_are_not_those_of_the_published_method():
    folder = Path(__file__).parents[2] / "fixtures" / "0.2" / "run"
    old = read_run(folder, root=folder.parent, sweep=folder.parent, job=Job(folder="run"))
    labels = {row.label for row in summarize([old, ran("neuroshard", costs="learned")]).rows}
    assert labels == {"search (0.2)", "neuroshard (costs: learned)"}


def test_rows_name_costs_and_average_no_different_ones():
    runs = [ran("autoshard", seed, costs="its own") for seed in (0, 1)]
    runs += [ran("autoshard", costs="this hardware's"), ran("search", costs="learned")]
    comparison = summarize([*runs, run_of("search", 1)])
    assert {row.label: row.fields["runs"] for row in comparison.rows} == {
        "autoshard (costs: its own)": 2,
        "autoshard (costs: this hardware's)": 1,
        "search (costs: learned)": 2,  # the one that failed planned by the same
    }


def test_mean_deviation_and_count():
    costs = [10.0, 12.0, 17.0]
    comparison = summarize([ran(seed=i, embedding_cost_ms=x) for i, x in enumerate(costs)])
    spread = row_of(comparison, "dim").spread("embedding_cost_ms")
    assert spread == pytest.approx((13.0, np.std(costs, ddof=1), 3))
    (row,) = comparison.summary.to_dicts()
    assert row["embedding_cost_ms_mean"] == pytest.approx(13.0)
    assert row["embedding_cost_ms_n"] == row["runs"] == row["succeeded"] == row["seeds"] == 3
    one = cells(summarize([ran(embedding_cost_ms=10.0)]))["dim"]
    assert one["embedding cost, ms"] == "10.00", "one run has no deviation"


def test_failures_are_counted_and_told():
    runs = [ran(seed=seed, embedding_cost_ms=10.0 + seed) for seed in range(3)]
    runs += [run_of("dim", 3, reason="a | b\nof *c*", log="sweep/log")]
    comparison = summarize([*runs, run_of("size", state="cancelled")], ["sweep.json is broken"])
    text, found = comparison_markdown(comparison), cells(comparison)
    assert (found["dim"]["embedding cost, ms"], found["dim"]["runs"]) == ("11.00 ± 1.00", "3 / 4")
    assert (found["size"]["embedding cost, ms"], found["size"]["runs"]) == ("-", "0 / 1")
    assert r": failed: a \| b of \*c\* (log: sweep/log)" in text
    assert ": cancelled: no reason known (no log)" in text
    assert "- sweep.json is broken" in text.splitlines()
    assert "5 runs, 3 succeeded; 4 seeds" in text
    short = short_table(comparison)
    assert ": failed: a | b of *c* (log: sweep/log)" in short
    assert "sweep.json is broken" in short.splitlines()
    assert cells(summarize([run_of("dim")]))["dim"]["runs"] == "0 / 1", "nothing succeeded"


def test_a_figure_that_some_runs_lack_says_so():
    """Else a mean over two would pass for one over three."""
    runs = [ran(seed=0, samples_per_s=10.0), ran(seed=1, samples_per_s=20.0), ran(seed=2)]
    row = cells(summarize(runs))["dim"]
    assert (row["samples/s"], row["runs"]) == ("15 ± 7 (2 of 3)", "3 / 3")


@pytest.mark.parametrize(
    "other",
    [
        ran("random", 0, setting="batch_size=64", samples_per_s=50.0),
        ran("random", 0, device="H100", samples_per_s=50.0),
        ran("random", 1, samples_per_s=50.0),
        ran("random", 0, options="seed=7", samples_per_s=50.0),
        ran("random", 0, samples_per_s=0.0),
    ],
    ids=["setting", "device", "seed", "options", "no_throughput"],
)
def test_ratios_are_over_the_same_conditions_only(other):
    runs = [other, ran("dim", 0, samples_per_s=100.0)]
    assert row_of(summarize(runs), "dim").ratios["time_over_random"] is None
    pair = ran("random", 0, samples_per_s=80.0, sweep="earlier")
    ratio = row_of(summarize([*runs, pair]), "dim").ratios["time_over_random"]
    assert (ratio.ratio, ratio.num_pairs) == pytest.approx((0.8, 1))


@pytest.mark.parametrize(
    ("other", "conditions"),
    [
        ({"setting": "batch_size=128 x=1"}, {"setting": "batch_size=128"}),
        ({"world_size": 8, "device": "H100"}, {"ranks": "8", "device": "H100"}),
        ({"ranks_per_host": 1}, {"ranks per host": "1"}),
        ({"versions": {"torch": "2.11"}}, {"versions": "torch=2.11"}),
    ],
    ids=["setting", "hardware", "hosts", "versions"],
)
def test_what_differs_is_never_averaged(other, conditions):
    here = {"setting": "batch_size=64 x=1"}
    comparison = summarize(
        [ran(embedding_cost_ms=10.0, **here), ran(embedding_cost_ms=20.0, **(here | other))]
    )
    assert [row.spread("embedding_cost_ms")[2] for row in comparison.rows] == [1, 1]
    (row,) = [row for row in comparison.rows if row.conditions == conditions]
    assert row.spread("embedding_cost_ms")[0] == 20.0
    text = comparison_markdown(comparison)
    assert [*cells(comparison)["dim"]][: 1 + len(conditions)] == ["sharder", *conditions]
    common = "x=1" if "setting" in other else "batch_size=64 x=1"
    assert f"- the same in all: {common}" in text.splitlines()


def test_a_summary_says_how_many_predictions_are_extrapolated():
    runs = [ran(prices="prior, extrapolated", seed=0), ran(prices="prior", seed=1)]
    assert "- predictions of 1 run are extrapolated, see train.log" in comparison_markdown(
        summarize(runs)
    )
    assert "extrapolated" not in comparison_markdown(summarize(runs[1:]))


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
    found = cells(comparison, table=1)
    assert found["dim"]["prediction"] == "-5.0% ± 21.2% (2 of 3)"
    assert found["size"]["prediction"] == "-"
    summary = csv_rows(comparison.summary)
    assert [row["prediction_error_n"] for row in summary] == ["2", "0"]


def test_predictions_by_other_costs_are_left_out():
    """They would differ by the costs, and not by the sharders."""
    figures = {"embedding_cost_ms": 10.0, "predicted_ms": 12.0, "gap": 0.1}
    for digests, are_shown in ((("aa", "aa"), True), (("aa", "bb"), False)):
        runs = [ran(seed=i, **figures, prices_digest=digest) for i, digest in enumerate(digests)]
        comparison = summarize(runs)
        assert ("gap" in cells(comparison)["dim"]) == are_shown
        assert ("prediction" in cells(comparison, table=1)["dim"]) == are_shown
        assert ("cost models: not the same" in comparison_markdown(comparison)) != are_shown


def test_tables_for_programs():
    comparison = summarize(
        [ran(seed=0, setting="x=1", loss=0.123456789), run_of("dim", reason="a,\n'b\"")]
    )
    rows = csv_rows(comparison.table)
    assert [row["state"] for row in rows] == ["failed", SUCCEEDED]
    assert rows[0]["reason"] == "a,\n'b\""
    assert [row["loss"] for row in rows] == ["", "0.123456789"]
    assert rows[1]["setting"] == "x=1"
    summary = csv_rows(comparison.summary)
    counts = [(row["runs"], row["succeeded"], row["loss_n"]) for row in summary]
    assert counts == [("1", "0", "0"), ("1", "1", "1")]


def test_means_are_over_the_rounds_that_all_runs_have(tmp_path):
    """The machine may have been slower in later rounds, which leave out the slow sharders."""
    speeds = {"aa": [100.0] * 6 + [50.0] * 6, "bb": [100.0] * 6}
    comparison = summarize([in_rounds(tmp_path, name, found) for name, found in speeds.items()])
    assert comparison.summary["samples_per_s_mean"].to_list() == [100.0, 100.0]


def test_ratios_with_intervals_are_in_tables_files_and_plots(tmp_path):
    """The table is ordered by them: it would be by cost, which the runs do not know, or by name."""
    speeds = {"random": [100.0] * 8, "aa": [120.0, 121.0] * 4, "zz": [119.0, 122.0] * 4}
    comparison = summarize([in_rounds(tmp_path, name, found) for name, found in speeds.items()])
    assert [row.label for row in comparison.rows] == ["random", "zz", "aa"]
    shown = cells(comparison)
    assert shown["aa"]["time / random's [95 %]"] == "0.830 [0.826, 0.833]"
    assert shown["zz"]["time / fastest's [95 %]"] == "1.000 [0.992, 1.008] tie"
    references = {"random": "time / random's", "aa": "time / fastest's"}
    for sharder, title in (*references.items(), ("aa", "cost / fastest's")):
        assert shown[sharder][f"{title} [95 %]"] == "reference"
    by_name = {row["sharder"]: row for row in comparison.summary.to_dicts()}
    for name, of_rounds in speeds.items():
        assert by_name[name]["samples_per_s_mean"] == pytest.approx(np.mean(of_rounds))
        assert by_name[name]["step_ms_mean"] == 1.0
    assert comparison.table["samples_per_s"].unique().to_list() == [1.0], "that of the training"
    assert (shown["random"]["samples/s"], shown["random"]["embedding cost, ms"]) == ("100", "10.00")
    assert cells(comparison, table=1)["random"]["prediction"] == "+20.0%"
    assert " 10.00 " in short_table(comparison)
    figures = comparison_figures(comparison)
    assert ends(figures["comparison/throughput"]) == pytest.approx([100.0, 120.5, 120.5])
    assert ends(figures["comparison/embedding_cost"])[0] == pytest.approx(10.0)
    assert [by_name[name]["tie"] for name in speeds] == [False, None, True]
    assert by_name["random"]["time_over_fastest"] == pytest.approx(1.205, abs=1e-3)
    low, high = (by_name["random"][f"time_over_fastest_{end}"] for end in ("low", "high"))
    assert 1.19 < low < 1.205 < high < 1.22
    assert by_name["random"]["cost_over_fastest"] == pytest.approx(1.205, abs=1e-3)
    assert by_name["random"]["time_over_fastest_pairs"] == 8
    figure = figures["comparison/relative_throughput"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.830", "1.000", "1.000"]
    fills = [
        line.get_markerfacecolor() for line in figure.axes[0].lines if line.get_marker() == "o"
    ]
    assert fills.count("white") == 1, "the tie"
    axes = figures["comparison/cost_and_throughput"].axes[0]
    points = {bars.get_label(): bars.lines[0] for bars in axes.containers}
    assert [*points] == ["random", "zz", "aa"]
    assert points["aa"].get_xydata().tolist() == [[1.0, 1.0]], "the fastest"
    assert points["random"].get_xydata() == pytest.approx(np.array([[1.205, 0.830]]), abs=1e-3)
    assert [line.get_markerfacecolor() == "white" for line in points.values()] == [
        False,
        True,
        False,
    ]


def test_each_setting_has_its_ranking(tmp_path):
    runs = [
        in_rounds(tmp_path / batch, sharder, [speed] * 8, setting=f"batch_size={batch}")
        for sharder, speed in (("dim", 1.0), ("size", 1.2))
        for batch in ("64", "128")
    ]
    comparison = summarize(runs)
    said = "size is the fastest, with 95 % confidence in each ratio"
    assert short_table(comparison).splitlines()[-2:] == [
        f"batch_size=64: {said}",
        f"batch_size=128: {said}",
    ]
    assert said in comparison_markdown(comparison)
    disturbed = {"round": 2, "core_wait": 0.5, "samples_per_s": 0.1}
    rounds_file(runs[0].folder).append({**dataclasses.asdict(ROUND), **disturbed})
    comparison = summarize(runs)
    assert "8 rounds; measured again: 0; disturbed by other work: 1 (load" in comparison_markdown(
        comparison
    )
    assert {row.spread("samples_per_s")[0] for row in comparison.rows} == {1.0, 1.2}, (
        "without that round"
    )
    pairs = [row["time_over_fastest_pairs"] for row in comparison.summary.to_dicts()]
    assert sorted(filter(None, pairs)) == [7, 8], "of that setting, ratios are, too"


def test_runs_with_and_without_rounds_are_not_averaged(tmp_path):
    runs = [in_rounds(tmp_path, "dim", [100.0] * 6), ran(samples_per_s=50.0)]
    comparison = summarize(runs)
    spreads = {
        row.conditions["measured in"]: row.spread("samples_per_s") for row in comparison.rows
    }
    assert spreads == {"rounds": (100.0, 0.0, 1), "training": (50.0, 0.0, 1)}
    comparison = summarize([*runs, *(dataclasses.replace(run, sharder="size") for run in runs)])
    starts = [text.partition(":")[0] for text in comparison.conclusions]
    assert sorted(starts) == ["measured in rounds", "measured in training"]


def test_runs_apart_are_paired_by_seed_and_say_what_was_unequal():
    """Hosts, load and time of runs that were not measured in rounds are not the same."""
    runs = [
        ran(name, seed, samples_per_s=speed + seed, **where)
        for name, speed, where in (
            ("dim", 100.0, {"hosts": {"a": 0.5}, "began_s": 1e9, "core_wait": 0.01}),
            ("size", 101.0, {"hosts": {"b": 3.0}, "began_s": 1e9 + 1800, "core_wait": 0.2}),
        )
        for seed in (0, 1)
    ]
    comparison = summarize(runs)
    assert short_table(comparison).splitlines()[-1] == (
        "size has too few pairs to compare with dim; hydra.launcher.rounds=3 or more would "
        "resolve a difference of 2%"
    )
    text = comparison_markdown(comparison)
    assert "not measured side by side: on " in text
    assert "; others had the cores for 1% to 20% of a training" in text
