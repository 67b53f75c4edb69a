"""The benchmark goes on where it ended, counts failures, calls noise a tie, and writes its page."""

import argparse
import json
import math
import time

import numpy as np
import polars as pl
import pytest

from benchmarks.noise import noise_of
from dlrm_sharded.datasets.benchmark_task import BenchmarkTask
from dlrm_sharded.datasets.task_sets import scaling_task
from dlrm_sharded.files.errors import ConfigError
from full_benchmark import planned
from full_benchmark import run as whole
from full_benchmark.analysis import compare, exponent, figures, first_or_tied, tie_margin
from full_benchmark.claims import CLAIMS
from full_benchmark.page import page
from full_benchmark.production import PAPER_COST_MS, PAPER_GAIN, throughput_gain
from full_benchmark.sizes import ALL_SHARDERS, FULL, SMALL
from studies import store
from studies.study import Case, StudyRun


def rows_of(costs, key="cost_ms"):
    return [
        {"sharder": sharder, "number": number, key: cost}
        for sharder, of_sharder in costs.items()
        for number, cost in enumerate(of_sharder)
    ]


def test_rows_survive_a_kill_within_a_line(tmp_path):
    begun = []

    def case(key, cost_ms):
        return Case(key, lambda: begun.append(key) or [{"cost_ms": cost_ms}])

    def killed():
        raise KeyboardInterrupt

    def start():
        return StudyRun("planned", tmp_path, seconds=60, small=True)

    with pytest.raises(KeyboardInterrupt):
        start().rows([case("a", 1.0), Case("b", killed)], "predicted")
    with store.cases_path(tmp_path, "planned").open("a") as file:
        file.write('{"case": "b", "figu')
    start().rows([case("a", 1.0), case("b", 2.0)], "predicted")
    assert begun == ["a", "b"]
    figures = json.loads((tmp_path / "planned.figures.json").read_text())["figures"]
    assert figures["rows"] == [
        {"study": "planned", "basis": "predicted", "case": "a", "cost_ms": 1.0},
        {"study": "planned", "basis": "predicted", "case": "b", "cost_ms": 2.0},
    ]
    assert figures["seconds"] >= 0
    assert len(figures["loads"]) == 2


def test_a_folder_of_other_hardware_is_refused(tmp_path):
    store.keep_settings(tmp_path, {"small": True, "device": "cpu: one"})
    with pytest.raises(ConfigError, match=r"\(device 'cpu: one', now 'cpu: other'\); give another"):
        store.keep_settings(tmp_path, {"small": True, "device": "cpu: other"})


def test_a_task_without_a_plan_is_a_loss():
    found = figures(rows_of({"a": [1.0, 2.0, None], "b": [2.0, 2.0, 5.0]}), "cost_ms")
    against = compare(found, "a", "b", margin=0.01)
    assert (against.wins, against.ties, against.losses) == (1, 1, 1)
    assert against.ratio == pytest.approx(math.sqrt(0.5))
    first, behind = first_or_tied(found, "a", margin=0.01)
    assert len(first) == 2
    assert len(behind) == 1


def test_noise_that_all_plans_share_is_none():
    rng = np.random.default_rng(0)
    shared = np.exp(rng.normal(0, 0.3, 8))
    still = [
        {"sharder": name, "number": 0, "rounds_ms": (cost * shared).tolist()}
        for name, cost in (("a", 1.0), ("b", 2.0))
    ]
    assert noise_of(still, "rounds_ms") == pytest.approx(0, abs=1e-12)
    own = [
        {"sharder": name, "number": n, "rounds_ms": np.exp(rng.normal(0, 0.1, 8)).tolist()}
        for name in "abc"
        for n in range(20)
    ]
    # the standard error of a median of 8 rounds that vary by 10 %
    assert noise_of(own, "rounds_ms") == pytest.approx(0.1 * 1.2533 / math.sqrt(8), rel=0.2)
    assert tie_margin(0.0) > 0


def test_the_exponent_is_the_slope_of_a_power_law():
    assert exponent([(10, 3.0), (100, 30.0), (1000, 300.0)]) == pytest.approx(1.0)
    assert math.isnan(exponent([(10, 3.0)]))


def test_the_papers_own_costs_give_the_papers_own_throughput():
    """Within 13 points for every sharder, as one number stands for the rest of the step."""
    for sharder, cost_ms in PAPER_COST_MS.items():
        gain = throughput_gain(cost_ms, PAPER_COST_MS["random"])
        assert gain == pytest.approx(PAPER_GAIN[sharder], abs=0.13)
    gain = throughput_gain(PAPER_COST_MS["neuroshard"], PAPER_COST_MS["random"])
    assert gain == pytest.approx(0.549, abs=0.005)


def test_a_sharder_that_takes_too_long_has_no_plan(monkeypatch):
    monkeypatch.setattr(planned, "outcome", lambda *given: time.sleep(600))
    task = BenchmarkTask("scaling", scaling_task(10, 2))
    found = planned.outcome_in_time(0, task, "dim", planned.planner_on("dim", None), limit_s=0.2)
    assert found.cost_ms is None
    assert found.error == "it takes more than 0.2 s"
    assert 0.2 <= found.solve_s < 600


def test_sizes_name_every_kind_of_feasibility_task():
    from dlrm_sharded.datasets.feasibility_tasks import FEASIBILITY_KINDS

    assert {FEASIBILITY_KINDS[n % 20] for n in FULL.planned["feasibility"]} == set(
        FEASIBILITY_KINDS
    )
    assert len(set(ALL_SHARDERS)) == len(ALL_SHARDERS)
    assert SMALL.production < FULL.production


def test_a_page_without_rows_calls_no_claim_true():
    text = page({}, {"hardware": "none"}, {})
    assert text.count("| not run |") == len(CLAIMS)
    assert "holds" not in text


@pytest.mark.parametrize(
    ("num_shards", "cause"),
    [(4, "it splits or replicates more (4 shards instead of 2)"), (2, "the search does not find")],
)
def test_the_page_says_why_another_plan_is_cheaper(num_shards, cause):
    shared = {"set": "paper", "number": 0, "world_size": 2, "kind": "", "gpu": None}
    shared |= {"lower_bound_ms": 1.0, "solve_s": 0.1, "refused": False}
    rows = [
        shared | {"sharder": "neuroshard", "cost_ms": 2.0, "num_shards": 2},
        shared | {"sharder": "hugectr", "cost_ms": 1.0, "num_shards": num_shards},
    ]
    text = page({"planned": rows}, {"hardware": "none"}, {})
    assert f"hugectr is 100.0 % cheaper: {cause}" in text


def test_a_rehearsal_writes_its_files_and_does_nothing_twice(tmp_path, capsys):
    options = argparse.Namespace(
        out=tmp_path / "out", docs=tmp_path / "docs", studies=["scaling", "production"], small=True
    )
    assert whole.run(options) == 0
    text = (tmp_path / "docs" / "benchmark.md").read_text()
    for heading in ("(measured)", "(predicted, a100_sxm_80gb)", "The papers' claims"):
        assert heading in text
    assert "say nothing" in text
    frame = pl.read_parquet(tmp_path / "out" / "results.parquet")
    assert set(frame["study"]) == {"scaling", "production"}
    assert frame.filter(pl.col("sharder") == "neuroshard")["cost_ms"].null_count() == 0
    assert len(pl.read_csv(tmp_path / "out" / "results.csv")) == len(frame)
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))
    assert (tmp_path / "docs" / "benchmark_scaling.png").stat().st_size > 1000
    before = (tmp_path / "out" / "scaling.json").stat().st_mtime_ns
    capsys.readouterr()
    assert whole.run(options) == 0
    assert "scaling: ok, earlier" in capsys.readouterr().out
    assert (tmp_path / "out" / "scaling.json").stat().st_mtime_ns == before
