"""The statistics of the benchmarks that compare sharders."""

import dataclasses
import importlib
import json
import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from dlrm_sharded.datasets.feasibility_tasks import feasibility_tasks
from dlrm_sharded.files.errors import ConfigError, InvalidPlanError
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import ShardingTask
from studies.study import Case
from tests.conftest import ROOT

SCRIPTS = ROOT / "scripts"
COSTS = {
    "a": {0: 1.0, 1: 2.0, 2: 3.0, 4: 1.0},
    "b": {0: 2.0, 1: 2.0, 2: 2.0, 3: 9.0},
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(SCRIPTS)
    loggers = [logging.getLogger(name) for name in ("dlrm_sharded", "torchrec")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def compared() -> Iterator[ModuleType]:
    return importlib.import_module("benchmarks.compared")


def test_ratios_are_of_tasks_that_both_solve(compared: ModuleType) -> None:
    found = compared.versus(COSTS, "a", "b")
    assert (found.num, found.score) == (3, "1/1/1")
    assert found.mean == pytest.approx((0.5 + 1 + 1.5) / 3)
    assert compared.over_best(COSTS) == (
        3,
        {"a": pytest.approx((1 + 1 + 1.5) / 3), "b": pytest.approx((2 + 1 + 1) / 3)},
    )


def test_nothing_in_common(compared: ModuleType) -> None:
    costs = {"a": {0: 1.0}, "b": {1: 1.0}}
    assert str(compared.versus(costs, "a", "b")) == "-"
    num, means = compared.over_best(costs)
    assert num == 0
    assert np.isnan(list(means.values())).all()


def test_interval_is_students(compared: ModuleType) -> None:
    values = [1.02, 1.1, 0.97, 1.3, 1.0]
    expected = ttest_1samp(values, 1.0).confidence_interval(0.95)
    mean, low, high = compared.mean_with_interval(values)
    assert (low, high) == pytest.approx((expected.low, expected.high))
    assert mean == pytest.approx(np.mean(values))
    assert compared.mean_with_interval([2.0]) == (2.0, -np.inf, np.inf)


def test_reference(compared: ModuleType) -> None:
    assert compared.choose_reference(None, ["dim", "neuroshard_paper"]) == "neuroshard_paper"
    assert compared.choose_reference(None, ["dim", "size"]) == "dim"
    assert compared.choose_reference("size", ["dim", "size"]) == "size"
    with pytest.raises(ConfigError, match="must be one of dim, size"):
        compared.choose_reference("lookup", ["dim", "size"])


def test_rows_of_a_killed_run(compared: ModuleType, tmp_path: Path) -> None:
    """The same command goes on, another one is refused, and the rows can be read at any time."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {"number": 0, "sharder": "a", "cost_ms": 1.5},
        {"number": 0, "sharder": "b", "cost_ms": None},
    ]
    begun = []

    def cases(*, is_killed: bool) -> Iterator[Case]:
        yield Case("a", lambda: begun.append("a") or rows[:1])
        if is_killed:
            raise KeyboardInterrupt
        yield Case("b", lambda: begun.append("b") or rows[1:])

    new = Namespace(jsonl=path, from_file=None, reference=None, seed=0)
    again = Namespace(jsonl=None, from_file=path, reference="a", seed=0)
    with pytest.raises(KeyboardInterrupt):
        compared.rows_of(new, cases(is_killed=True))
    with path.open("a") as file:
        file.write('{"case": "b", "fig')
    assert compared.rows_of(again, cases(is_killed=True)) == rows[:1]
    assert compared.rows_of(new, cases(is_killed=False)) == rows
    assert begun == ["a", "b"]
    assert compared.rows_of(again, cases(is_killed=True)) == rows
    assert compared.costs_of(rows) == {"a": {0: 1.5}, "b": {}}
    other = Namespace(**vars(new) | {"seed": 1})
    with pytest.raises(ConfigError, match=r"rows of other settings \(seed 0, now 1\)"):
        compared.rows_of(other, cases(is_killed=False))
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from_plain = Namespace(**vars(again) | {"from_file": plain})
    assert compared.rows_of(from_plain, cases(is_killed=True)) == rows


def test_a_wrong_reference_leaves_no_file(compared: ModuleType, tmp_path: Path) -> None:
    """A corrected command can then write the file."""
    path = tmp_path / "rows.jsonl"
    options = Namespace(jsonl=path, from_file=None, sharders=["a", "b"], reference="c")
    reports: list[tuple[object, ...]] = []
    cases = [Case("a", lambda: [{"sharder": "a"}])]
    with pytest.raises(ConfigError, match="must be one of a, b"):
        compared.compare(options, cases, lambda *of: reports.append(of))
    assert not path.exists()
    options.reference = "b"
    compared.compare(options, cases, lambda *of: reports.append(of))
    assert reports == [([{"sharder": "a"}], "b")]


def test_outcomes_of_plans_and_of_refusals(compared: ModuleType) -> None:
    plans = importlib.import_module("benchmarks.plans")
    tasks = {of_set.kind: of_set for of_set in feasibility_tasks(num=20)}
    planner = compared.planner_of("size,sharder.seed=1")
    compared.quiet()

    solved = plans.outcome(0, tasks["roomy"], "size", planner)
    plan, report = planner.plan(tasks["roomy"].task)
    assert solved.cost_ms == report.cost.cost_ms
    assert (solved.lower_bound_ms, solved.gap) == (report.lower_bound_ms, report.gap)
    assert solved.num_shards == len(plan.shards)
    assert solved.error is None
    for kind, reason in {"large_columns": "table", "infeasible": "no plan can fit"}.items():
        refused = plans.outcome(1, tasks[kind], "size", planner)
        assert refused.refused
        assert refused.cost_ms is None
        assert refused.error.startswith(f"InfeasibleTaskError: {reason}")

    @dataclasses.dataclass
    class Nothing:
        def shard(self, task: ShardingTask) -> ShardingPlan:
            return ShardingPlan(task.topology.world_size, ())

    broken = dataclasses.replace(planner, sharder=Nothing())
    failed = plans.outcome(2, tasks["roomy"], "nothing", broken)
    assert failed.error.startswith(InvalidPlanError.__name__)
    assert not failed.refused


def test_plans_report(compared: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    plans = importlib.import_module("benchmarks.plans")

    def row(number: int, sharder: str, cost_ms: float | None, kind: str = "x") -> dict[str, object]:
        outcome = plans.Outcome(number, kind, 10, 4, sharder, 0.5, cost_ms=cost_ms, refused=True)
        return dataclasses.asdict(outcome)

    rows = [row(0, "a", 1.0), row(0, "b", 2.0), row(1, "a", 3.0), row(1, "b", None)]
    rows[0]["lower_bound_ms"] = 0.8
    rows += [row(2, "a", None, "infeasible"), row(2, "b", None, "infeasible")]
    plans.report(rows, "b")
    overall, by_kind = (
        {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in table)}
        for table in (part.splitlines() for part in capsys.readouterr().out.strip().split("\n\n"))
    )
    assert overall["a"][:3] == ["2/2", "0.500", "0.500"]
    assert overall["a"][4:7] == ["1", "0.5000", "1/0/0"]
    assert overall["a"][7] == "25.0, 25.0 (1)"
    assert overall["b"][7] == "150.0, 150.0 (1)"  # the bound that a proved holds for b
    assert by_kind["a"] == ["2/2", "1/1"]
    assert by_kind["b"] == ["1/2", "1/1"]
