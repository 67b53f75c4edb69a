"""Runs the tests of the device: all that need a GPU, or on a CPU those that depend on the machine.

On a CPU these compare sharded training with unsharded, check what is measured, and recognize the
hardware.
"""

from __future__ import annotations

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

NO_TESTS = 5
"""Exit code of pytest if it runs no test."""

MOST_CHARACTERS = 2000
"""Characters of a failure that are kept beside those in the log."""


def run(study: StudyRun) -> None:
    on_cuda = study.device(or_cpu=True).type == "cuda"
    chosen = ON_GPUS if on_cuda else SMALL if study.small else ON_CPUS
    path = cases_path(study.out, "tests")
    command = module_command("pytest", "-p", __name__, f"--cases={path}", *chosen)
    done = study.command(command, folder=ROOT)
    study.record("selection", " ".join(chosen))
    study.record("exit_code", done.exit_code)
    cases = Cases(path)
    study.check(bool(cases.planned), "no test was found")
    _record(study, cases)
    study.check(done.exit_code in (0, 1, NO_TESTS), f"pytest ended with exit code {done.exit_code}")


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


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TestCases(Cases(config.getoption("--cases"))))


class TestCases:
    """Writes every test as it ends, and leaves out those that an earlier call has finished."""

    def __init__(self, cases: Cases) -> None:
        self._cases = cases
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
