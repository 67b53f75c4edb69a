"""The parts of the benchmark: their rows survive kills, and their figures are right."""

import dataclasses
import json
import logging
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from scipy.stats import ttest_1samp

from benchmarks import (
    figures,
    mlperf_steps,
    plans,
    policies,
    stalls,
    sweeps,
    whole,
)
from benchmarks.claims import CLAIMS, OURS, claims_table
from benchmarks.page import page
from benchmarks.planners import planner_of
from dlrm_sharded.contest import entry as contest
from dlrm_sharded.contest.cases import solve_in_time
from dlrm_sharded.datasets.feasibility_tasks import FEASIBILITY_KINDS, feasibility_tasks
from dlrm_sharded.datasets.task_sets import TRAINED_MAX_TABLE_SHARE, scaling_task, trained_task
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from studies import parts, store
from studies.processes import quiet
from studies.study import Case, StudyRun
from tests.unit.contest.entries import entry_of

COSTS = {
    "a": {(0,): 1.0, (1,): 2.0, (2,): 3.0, (4,): 1.0},
    "b": {(0,): 2.0, (1,): 2.0, (2,): 2.0, (3,): 9.0},
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("dlrm_sharded", "torchrec")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def row_of(number, sharder, **fields):
    return {"number": number, "sharder": sharder, **fields}


def test_ratios_are_of_tasks_that_both_solve():
    """A task that only one of them solves is a win or a loss."""
    found = figures.versus(COSTS, "a", "b")
    assert (found.num, found.score) == (3, "2/1/2")
    assert found.mean == pytest.approx((0.5 + 1 + 1.5) / 3)
    assert figures.behind(COSTS, "a") == {(2,): "b", (3,): "b"}
    assert figures.versus(COSTS, "a", "b", margin=0.6).score == "1/3/1"


def test_nothing_in_common():
    costs = {"a": {(0,): 1.0}, "b": {(1,): 1.0}}
    assert str(figures.versus(costs, "a", "b")) == "-"


def test_interval_is_students():
    values = [1.02, 1.1, 0.97, 1.3, 1.0]
    expected = ttest_1samp(values, 1.0).confidence_interval(0.95)
    mean, low, high = figures.mean_with_interval(values)
    assert (low, high) == pytest.approx((expected.low, expected.high))
    assert mean == pytest.approx(np.mean(values))
    assert figures.mean_with_interval([2.0]) == (2.0, -np.inf, np.inf)


def test_noise_that_all_plans_share_is_none():
    rng = np.random.default_rng(0)
    shared = np.exp(rng.normal(0, 0.3, 8))
    still = [
        row_of(0, name, rounds_ms=(cost * shared).tolist()) for name, cost in (("a", 1), ("b", 2))
    ]
    assert figures.noise_of(still, "rounds_ms") == pytest.approx(0, abs=1e-12)
    own = [
        row_of(n, name, rounds_ms=np.exp(rng.normal(0, 0.1, 8)).tolist())
        for name in "abc"
        for n in range(20)
    ]
    # the standard error of a median of 8 rounds that vary by 10 %
    expected = pytest.approx(0.1 * 1.2533 / math.sqrt(8), rel=0.2)
    assert figures.noise_of(own, "rounds_ms") == expected
    assert figures.noise_margin(0.0) == figures.TIE


def test_the_exponent_is_the_slope_of_a_power_law():
    assert figures.exponent([(10, 3.0), (100, 30.0), (1000, 300.0)]) == pytest.approx(1.0)
    assert math.isnan(figures.exponent([(10, 3.0)]))


def test_rows_of_a_killed_part(tmp_path):
    """The same command goes on, another one is refused, and the rows can be read at any time."""
    path = tmp_path / "rows.jsonl"
    rows = [row_of(0, "a", cost_ms=1.5), row_of(0, "b", cost_ms=None)]
    begun = []

    def cases(*, is_killed: bool) -> Iterator[Case]:
        yield Case("a", lambda: begun.append("a") or rows[:1])
        if is_killed:
            raise KeyboardInterrupt
        yield Case("b", lambda: begun.append("b") or rows[1:])

    new = Namespace(jsonl=path, from_file=None, reference=None, seed=0)
    again = Namespace(jsonl=None, from_file=path, reference="a", seed=0)
    with pytest.raises(KeyboardInterrupt):
        parts.rows_of(new, cases(is_killed=True))
    with path.open("a") as file:
        file.write('{"case": "b", "fig')
    assert parts.rows_of(again, cases(is_killed=True)) == rows[:1]
    assert parts.rows_of(new, cases(is_killed=False)) == rows
    assert begun == ["a", "b"]
    assert parts.rows_of(again, cases(is_killed=True)) == rows
    other = Namespace(**vars(new) | {"seed": 1})
    with pytest.raises(ConfigError, match=r"rows of other settings \(seed 0, now 1\)"):
        parts.rows_of(other, cases(is_killed=False))
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from_plain = Namespace(**vars(again) | {"from_file": plain})
    assert parts.rows_of(from_plain, cases(is_killed=True)) == rows


def test_a_wrong_reference_leaves_no_file(tmp_path, capsys):
    """A corrected command can then write the file."""
    path = tmp_path / "rows.jsonl"
    options = Namespace(jsonl=path, from_file=None, sharders=["a", "b"], reference="c")
    part = SimpleNamespace(
        cases=lambda options: [Case("a", lambda: [{"sharder": "a"}])],
        report=lambda rows, reference: f"{rows} over {reference}",
    )
    with pytest.raises(ConfigError, match="must be one of a, b"):
        parts.run_part(part, options)
    assert not path.exists()
    options.reference = "b"
    parts.run_part(part, options)
    assert capsys.readouterr().out == "\n[{'sharder': 'a'}] over b\n"


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
    found = json.loads((tmp_path / "planned.figures.json").read_text())["figures"]
    assert found["rows"] == [
        {"study": "planned", "basis": "predicted", "case": "a", "cost_ms": 1.0},
        {"study": "planned", "basis": "predicted", "case": "b", "cost_ms": 2.0},
    ]
    assert found["seconds"] >= 0
    assert len(found["loads"]) == 2


def test_a_case_that_fails_stops_no_other(tmp_path):
    run = StudyRun("loop", tmp_path, seconds=60, small=True)
    works = {"a": lambda: 1 / 0, "b": lambda: {"step_ms": 2.0}, "c": lambda: {}}
    found = run.each(works, seconds=lambda name: 600 if name == "c" else 0, goes_on=True)
    assert dict(found) == {"b": {"step_ms": 2.0}}
    assert run.failures[0] == "a: ZeroDivisionError: division by zero"
    assert run.failures[1].startswith("c: left out")


def test_a_folder_of_other_hardware_is_refused(tmp_path):
    store.keep_settings(tmp_path, {"small": True, "device": "cpu: one"})
    with pytest.raises(ConfigError, match=r"\(device 'cpu: one', now 'cpu: other'\); give another"):
        store.keep_settings(tmp_path, {"small": True, "device": "cpu: other"})


def test_outcomes_of_plans_and_of_refusals():
    tasks = {of_set.kind: of_set for of_set in feasibility_tasks(num=20)}
    planner = planner_of("size,sharder.seed=1")
    quiet()

    def entry_of_kind(kind, planner, limit_s=60.0):
        case = contest.Case(kind, "size", tasks[kind].task, planner, kind)
        return solve_in_time(case, limit_s=limit_s)

    solved = entry_of_kind("roomy", planner)
    plan, report = planner.plan(tasks["roomy"].task)
    assert solved.cost == report.cost
    assert (solved.lower_bound_ms, solved.shards) == (report.lower_bound_ms, plan.shards)
    assert len(solved.shard_ms) == len(plan.shards)
    assert solved.error is None
    for kind, reason in {"large_columns": "table", "infeasible": "no plan can fit"}.items():
        refused = entry_of_kind(kind, planner)
        assert refused.is_infeasible
        assert refused.error.startswith(reason)

    @dataclasses.dataclass
    class Nothing:
        def shard(self, task: ShardingTask) -> ShardingPlan:
            return ShardingPlan(task.topology.world_size, ())

    failed = entry_of_kind("roomy", dataclasses.replace(planner, sharder=Nothing()))
    assert failed.error
    assert not failed.is_infeasible

    @dataclasses.dataclass
    class Slow:
        def shard(self, task: ShardingTask) -> ShardingPlan:
            time.sleep(600)

    found = entry_of_kind("roomy", dataclasses.replace(planner, sharder=Slow()), limit_s=0.2)
    assert found.error == "it takes more than 0.2 s"
    assert 0.2 <= found.solve_s < 600


def plan_row(number, sharder, cost_ms, kind="x", task_set="paper", **fields):
    frame = {"set": task_set, "gpu": None, "number": number, "num_tables": 10, "world_size": 4}
    row = frame | {"kind": kind, "sharder": sharder, "cost_ms": cost_ms, "is_infeasible": True}
    bound = {"lower_bound_ms": fields.pop("lower_bound_ms", None)}
    entry = entry_of(str(number), sharder, cost_ms, **bound).to_json()
    return row | {"solve_s": 0.5, "entry": entry} | fields


def test_plans_report():
    rows = [plan_row(0, "a", 1.0, lower_bound_ms=0.8), plan_row(0, "b", 2.0)]
    rows += [plan_row(1, "a", 3.0), plan_row(1, "b", None)]
    rows += [plan_row(2, "a", None, "infeasible"), plan_row(2, "b", None, "infeasible")]
    lines = plans.report(rows, "b").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| a", "| b"))]
    assert cells[0][1:5] == ["2/2", "0.5000", "0.5000", "2/0/0"]
    assert cells[0][5:7] == ["25.0, 25.0 (1)", "1.00, 1.00"]
    assert cells[1][5] == "150.0, 150.0 (1)"  # the bound that a proved holds for b
    assert cells[2:] == [["a", "2/2", "1/1"], ["b", "1/2", "1/1"]]
    assert "- no plan: 1, b: no room" in lines


def test_the_report_says_how_planning_time_grows():
    rows = [
        plan_row(n, "dim", 1.0, task_set="sized", num_tables=n, solve_s=n / 100) for n in (10, 100)
    ]
    text = plans.report(
        [*rows, plan_row(1000, "dim", None, task_set="sized", num_tables=1000)], None
    )
    assert "| num_tables, world_size 4 | dim | 10: 0.10, 100: 1.00 | 1.00 | 1,000 |" in text


def test_tasks_have_the_size_that_is_asked_for():
    task = scaling_task(30, 4)
    assert (len(task.tables), task.topology.world_size) == (30, 4)
    assert scaling_task(30, 8).tables[0].embedding_dim == task.tables[0].embedding_dim
    number, found = plans._sized(plans.PRODUCTION, "30x16", 0, "cuda")
    assert (number, found.task.topology.world_size) == (30, 16)
    assert found.task.topology.local_world_size == 8
    assert (
        mlperf_steps.MLPERF_BATCH_SIZES[64]
        == plans._sized("mlperf", "32", 0, "cuda")[1].task.batch_size
    )


@pytest.mark.parametrize("number", range(6))
def test_trained_tasks_fit_their_ranks(number):
    topology = Topology(2, memory_bytes=GIB, compute_device="cpu")
    task = trained_task(number, topology)
    assert task == trained_task(number, topology)
    largest = max(4 * table.num_embeddings * table.embedding_dim for table in task.tables)
    assert largest <= TRAINED_MAX_TABLE_SHARE * GIB
    assert task.table_bytes < 0.7 * 2 * GIB
    assert sum(table.pooling_factor for table in task.tables) <= 101
    assert task.batch_size % 2 == 0


def test_the_benchmark_has_every_kind_of_feasibility_task():
    [command] = [c for c in whole.STUDIES[0].commands if "feasibility" in c]
    numbers = command.split("--numbers")[1].split("--sharders")[0].split()
    assert {FEASIBILITY_KINDS[int(n) % 20] for n in numbers} == set(FEASIBILITY_KINDS)


def test_a_page_without_rows_has_the_claims():
    text = page({}, whole.STUDIES, {"hardware": "none"}, {})
    assert all(claim.text in text for claim in CLAIMS)
    assert text.count("not measured") == len(CLAIMS)
    assert "(predicted)" not in text


def test_a_rehearsal_writes_its_files_and_does_nothing_twice(tmp_path, capsys):
    options = Namespace(
        out=tmp_path / "out", docs=tmp_path / "docs", studies=["scaling", "production"], small=True
    )
    assert whole.run(options) == 0
    text = (tmp_path / "docs" / "benchmark.md").read_text()
    for heading in (
        "Planning time as measured, and costs (predicted)",
        "production table (predicted)",
        "The papers' claims",
    ):
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


def test_a_policy_has_a_share_of_what_the_search_gains_over_the_best_heuristic():
    costs = {"dreamshard": 11.0, "dim": 12.0, "lookup": 15.0, policies.SEARCH: 10.0}
    kind = {"set": "16 columns", "world_size": 4}
    rows = [
        row_of(number, sharder, cost_ms=factor * cost, solve_s=0.01) | kind
        for number, factor in enumerate((1.0, 2.0))
        for sharder, cost in costs.items()
    ]
    rows.append(row_of(2, "dim") | kind)  # it found no plan
    [line] = [line for line in policies.report(rows, None).splitlines() if "| dreamshard |" in line]
    assert line.split(" | ")[2:6] == ["1.091", "1.364", "0.909", "50%"]


def test_a_paper_is_judged_by_the_sharder_of_its_name_alone():
    """This project's own search, however cheap its plans are, proves no claim of a paper."""
    costs = {"random": 30.0, "torchrec": 15.0, "neuroshard_paper": 10.0, "neuroshard": 1.0}
    production = [row_of(0, sharder, cost_ms=cost) for sharder, cost in costs.items()]
    models = {"autoshard": 11.0, "dreamshard": 9.0, "lookup": 10.0, "dim": 12.0}
    planned = [row_of(0, sharder, cost_ms=cost, set="models") for sharder, cost in models.items()]
    scaling = [
        row_of(size, "dreamshard", solve_s=s, num_tables=size)
        for size, s in ((500, 0.5), (1000, 2))
    ]
    rows = {"production": production, "planned": planned, "scaling": scaling}
    found = [line.split(" | ")[2:] for line in claims_table(rows).splitlines()[2:]]
    assert found[0] == ["`neuroshard_paper`", "3.00 x", "production", "holds |"]
    assert found[1] == ["`neuroshard_paper`", "1.50 x", "production", "does not hold |"]
    assert found[2] == ["`dreamshard`", "0.50 s", "scaling", "holds |"]
    assert found[4] == ["`dreamshard`", "1.11 x", "planned, models", "holds |"]
    assert found[6] == ["`autoshard`", "0.91 x", "planned, models", "does not hold |"]
    assert found[3][1:] == ["-", "policies", "not measured |"]
    assert found[5][1:] == ["-", "scaling", "no plan |"]
    papers = [claim for claim in CLAIMS if claim.source != OURS]
    assert {claim.sharder for claim in papers} == {"neuroshard_paper", "dreamshard", "autoshard"}


@pytest.mark.parametrize(
    ("kind", "other", "found"),
    [
        ("quiet", [90.0, 91.0, 90.0, 92.0, 89.0, 90.0, 91.0], "2 | 2 | 0 | 0 | 6"),
        ("quiet", [110.0, 90.0, 105.0, 95.0, 101.0, 99.0, 100.0], "2 | 0 | 0 | 2 | -"),
        ("apart", [103.0], "2 | 0 | 2 | 0 | -"),
        ("apart", [101.0], "2 | 0 | 0 | 2 | -"),
    ],
    ids=["slower", "tie", "apart", "apart_tie"],
)
def test_what_sweeps_tell_apart_is_counted(kind, other, found):
    rows = [
        {"kind": kind, "step_ms": 10.0, "plan": plan, "samples_per_s": [figures] * 2}
        for plan, figures in (("first", [100.0] * len(other)), ("mirrored", other))
    ]
    assert f"| {kind} | 10.0 | mirrored | - | {found} |" in sweeps.report(rows, None)


def test_stalls_are_those_above_the_loop_alone_of_their_round():
    """Of rounds of which one was slow, medians."""
    p999_ms = {"checkpoint": (3.0, 9.0, 2.0), "none": (1.0, 8.5, 1.0)}
    rows = [
        {"writer": writer, "round": number, "num": 7, "seconds": 2.0, "copy_s": 0.5}
        | {"median_ms": 1.0, "p999_ms": ms, "wait_p999_ms": 1.5, "wait_longest_ms": 4.0}
        | {"wait_s": 0.01}
        for writer, by_round in p999_ms.items()
        for number, ms in enumerate(by_round)
    ]
    lines = stalls.report(rows, None).splitlines()
    of_writer = dict(line.strip("| ").split("|", 1) for line in lines if line.startswith("|"))
    cells = [cell.strip() for cell in of_writer["checkpoint "].split("|")]
    assert cells == ["2.00", "0.50", "1.00", "3.00", "1.00", "1.50", "4.00", "0.50"]
