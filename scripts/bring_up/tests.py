"""Runs the tests of the device: all that need a GPU, or on a CPU those that depend on the machine.

On a CPU these compare sharded training with unsharded, check what is measured, and recognize the
hardware.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from studies.processes import module_command
from studies.runner import ROOT
from studies.store import Cases, cases_path
from studies.study import StudyRun

ON_GPUS = ("-m", "gpu", "tests/gpu")
ON_CPUS = (
    "tests/unit/hardware",
    "tests/distributed/test_hardware.py",
    "tests/distributed/test_measure.py",
    "tests/distributed/test_rank_bench.py",
    "tests/distributed/test_sharded_equals_unsharded.py",
    *("-k", "not test_sharded_equals_unsharded or 2-"),  # on 2 ranks
)
SMALL = ON_CPUS[:1]

STOPPED, NO_TESTS = 2, 5
"""Exit codes of pytest if it was stopped, and if it runs no test."""

LAST_S = 30
"""Time of the step in which no further test begins, so that its numbers are still written."""

MOST_CHARACTERS = 2000
"""Characters of a failure that are kept beside those in the log."""


def run(study: StudyRun) -> None:
    on_cuda = study.device(or_cpu=True).type == "cuda"
    chosen = ON_GPUS if on_cuda else SMALL if study.small else ON_CPUS
    path = cases_path(study.out, "tests")
    options = ("-v", "-p", __name__, f"--cases={path}")
    time_s = max(study.seconds_left - LAST_S, 1.0)
    command = module_command("pytest", *options, f"--time-s={time_s}", *chosen)
    done = study.command(command, folder=ROOT)
    study.record("selection", " ".join(chosen))
    study.record("exit_code", done.exit_code)
    cases = Cases(path)
    study.check(bool(cases.planned), "no test was found")
    _record(study, cases)
    if done.exit_code == STOPPED and study.seconds_left <= LAST_S:
        num_ended = len(cases.ended.keys() & {*cases.planned})
        is_whole = num_ended == len(cases.planned)
        study.check(is_whole, f"timed out after {num_ended} of {len(cases.planned)} tests")
    else:
        is_known = done.exit_code in (0, 1, NO_TESTS)
        study.check(is_known, f"pytest ended with exit code {done.exit_code}")


def _record(study: StudyRun, cases: Cases) -> None:
    """Keep the numbers of tests by outcome; let the step fail for each test that did."""
    ended = {name: case for name, case in cases.ended.items() if name in cases.planned}
    outcomes = [case.figures["outcome"] for case in ended.values()]
    for outcome in ("passed", "skipped", "failed"):
        study.record(outcome, outcomes.count(outcome))
        study.show(**{outcome: str(outcomes.count(outcome))})
    for name, case in ended.items():
        study.check(not case.failures, name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=Path, required=True, help="file of the tests that have ended")
    parser.addoption(
        "--time-s", type=float, default=math.inf, help="time in which tests may begin, s"
    )


def pytest_configure(config: pytest.Config) -> None:
    cases = Cases(config.getoption("--cases"))
    config.pluginmanager.register(TestCases(cases, time_s=config.getoption("--time-s")))


class TestCases:
    """Writes every test as it ends, and leaves out those that an earlier call has finished.

    Args:
        time_s: time from now after which no further test begins.
    """

    def __init__(self, cases: Cases, *, time_s: float) -> None:
        self._cases = cases
        self._ends_at = time.monotonic() + time_s
        self._outcome, self._seconds = "passed", 0.0
        self._failures: list[str] = []

    @pytest.hookimpl(trylast=True)  # after -k and -m
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        finished = [item for item in items if self._cases.finished(item.nodeid)]
        config.hook.pytest_deselected(items=finished)
        self._cases.plan(item.nodeid for item in items)
        items[:] = [item for item in items if item not in finished]

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.monotonic() >= self._ends_at:
            item.session.shouldstop = "there is no time left"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test after its third report: of its setup, of itself and of its teardown."""
        self._seconds += report.duration
        if report.failed:
            self._failures.append(f"{report.when}: {report.longreprtext[-MOST_CHARACTERS:]}")
        if report.skipped:
            self._outcome = "skipped"
        if report.when == "teardown":
            outcome = "failed" if self._failures else self._outcome
            figures = {"outcome": outcome, "seconds": self._seconds}
            self._cases.add(report.nodeid, figures, self._failures)
            self._outcome, self._seconds, self._failures = "passed", 0.0, []
