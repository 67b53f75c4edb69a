"""Comparisons of runs that rounds measured, and of runs under different prices."""

import dataclasses

import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.runs.comparison import summarize
from dlrm_sharded.runs.comparison_figures import comparison_figures
from dlrm_sharded.runs.comparison_text import comparison_markdown, short_table
from dlrm_sharded.runs.rounds import rounds_file
from tests.unit.runs.test_comparison import cells, ran
from tests.unit.runs.test_ranking import ROUND


def test_predictions_by_other_prices_are_left_out():
    """They would differ by the prices, and not by the sharders."""
    figures = {"embedding_cost_ms": 10.0, "predicted_ms": 12.0, "gap": 0.1}
    digests = ("aa", "aa"), ("aa", "bb")
    same, other = (
        summarize([ran(seed=i, **figures, prices_digest=digest) for i, digest in enumerate(pair)])
        for pair in digests
    )
    assert "gap, %" in cells(same)[0]
    assert "prediction, %" in cells(same, table=1)[0]
    assert "gap, %" not in cells(other)[0]
    assert "prediction, %" not in cells(other, table=1)[0]
    assert "prices: not the same in all" in comparison_markdown(other)
    assert "prices:" not in comparison_markdown(same)


def test_rounds_rank_the_runs_that_share_a_setting(tmp_path):
    runs = []
    for sharder, speed in (("dim", 1.0), ("size", 1.2)):
        for batch in ("64", "128"):
            run = ran(sharder, setting=(("batch_size", batch),), sweep=f"{tmp_path}/{batch}")
            runs.append(run)
            run.folder.mkdir(parents=True)
            write_json(run.folder / "plan.json", {"shards": [sharder]})
            for number in range(8):
                figure = 1000 * speed * (1 + 0.01 * (number % 3))
                fields = {**dataclasses.asdict(ROUND), "round": number, "samples_per_s": figure}
                rounds_file(run.folder).append(fields)
    comparison = summarize(runs)
    lines = short_table(comparison).splitlines()[-4:]
    assert lines[0] == "batch_size=64: size 1.200 x dim (1.2 to 1.2)"
    assert lines[3] == ("batch_size=128: size is the fastest, with 95 % confidence in each ratio")
    assert "size 1.200 x dim (1.2 to 1.2)" in comparison_markdown(comparison)
    (runs[0].folder / "plan.json").write_text("{")
    assert len(summarize(runs).rankings) == 2
    assert not summarize([ran("dim"), ran("size")]).rankings


def in_rounds(folder, sharder, speeds, **changes):
    """A run that rounds have measured at these speeds."""
    run = ran(sharder, sweep=str(folder), samples_per_s=1.0)
    run.folder.mkdir(parents=True)
    write_json(run.folder / "plan.json", {"shards": [sharder]})
    for number, speed in enumerate(speeds):
        fields = {**dataclasses.asdict(ROUND), "round": number, "samples_per_s": speed}
        rounds_file(run.folder).append({**fields, "embedding_cost_ms": 1000 / speed, **changes})
    return run


def test_ratios_with_intervals_are_in_tables_and_files(tmp_path):
    """The table is ordered by them: it would be by cost, which the runs do not know, or by name."""
    speeds = {"random": [100.0] * 8, "aa": [120.0, 121.0] * 4, "zz": [119.0, 122.0] * 4}
    comparison = summarize([in_rounds(tmp_path, name, found) for name, found in speeds.items()])
    assert [row.sharder for row in comparison.rows] == ["random", "zz", "aa"]
    titles, *rows = cells(comparison)
    shown = {row[0]: dict(zip(titles, row, strict=True)) for row in rows}
    assert shown["aa"]["x random (95 %)"] == "1.205 (1.2 to 1.21)"
    assert shown["zz"]["fastest x (95 %)"] == "1.000 (0.992 to 1.01, tie)"
    assert shown["aa"]["fastest x (95 %)"] == "-"
    by_name = {row["sharder"]: row for row in comparison.summary.to_dicts()}
    assert [by_name[name]["tie"] for name in speeds] == [False, None, True]
    assert by_name["random"]["fastest_over"] == pytest.approx(1.205, abs=1e-3)
    low, high = (by_name["random"][f"fastest_over_{end}"] for end in ("low", "high"))
    assert 1.19 < low < 1.205 < high < 1.22
    assert by_name["random"]["cost_over_fastest"] == pytest.approx(1.205, abs=1e-3)
    assert by_name["random"]["fastest_over_pairs"] == 8
    figure = comparison_figures(comparison)["comparison/relative_throughput"]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["0.830", "1.000, tie", "1.000"]


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
        "size ties with dim; at least 4 more seeds would give intervals; hydra.launcher.rounds=3 "
        "measures them side by side"
    )
    assert (
        "not measured side by side: on a (2 runs); b (2 runs); began within 30 minutes, at a load "
        "of 0.5 to 3.0; others had the cores for 1 to 20 % of a training"
    ) in comparison_markdown(comparison)


def test_repeated_rounds_are_told(tmp_path):
    quiet = in_rounds(tmp_path, "dim", [100.0] * 6)
    busy = in_rounds(tmp_path, "size", [90.0] * 6)
    rounds_file(busy.folder).append({**dataclasses.asdict(ROUND), "round": 2, "core_wait": 0.5})
    repeated = {**dataclasses.asdict(ROUND), "round": 4, "attempt": 1}
    rounds_file(busy.folder).append(repeated)
    assert (
        "rounds measured again, as other processes had the cores or steps varied more than usual: "
        "1 of 6; rounds that are disturbed still: 1"
    ) in short_table(summarize([quiet, busy]))
