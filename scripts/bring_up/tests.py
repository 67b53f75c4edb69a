"""Runs the tests of the device: all that need a GPU, or on a CPU those that depend on the machine.

On a CPU these compare sharded training with unsharded, check what is measured, and recognize the
hardware.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from first_hour.runner import ROOT
from first_hour.step_run import StepRun
from first_hour.tied import module_command

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
"""Exit code of pytest if it finds no test."""


def run(step: StepRun) -> None:
    on_cuda = step.device(or_cpu=True).type == "cuda"
    chosen = ON_GPUS if on_cuda else SMALL if step.small else ON_CPUS
    path = step.out / "tests.xml"
    path.unlink(missing_ok=True)
    done = step.command(module_command("pytest", *chosen, f"--junitxml={path}"), folder=ROOT)
    step.record("selection", " ".join(chosen))
    step.record("exit_code", done.exit_code)
    step.check(done.exit_code != NO_TESTS, "no test was found")
    if path.exists():
        _record(step, path)
    step.check(done.exit_code in (0, 1, NO_TESTS), f"pytest ended with exit code {done.exit_code}")


def _record(step: StepRun, path: Path) -> None:
    """Keep the numbers of tests by outcome; let the step fail for each test that did."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    failed = [case for case in cases if {"failure", "error"} & {part.tag for part in case}]
    skipped = [case for case in cases if case.find("skipped") is not None]
    num_passed = len(cases) - len(failed) - len(skipped)
    step.record("passed", num_passed)
    step.record("skipped", len(skipped))
    step.record("failed", len(failed))
    step.show(passed=str(num_passed), skipped=str(len(skipped)), failed=str(len(failed)))
    for case in failed:
        step.check(False, f"{case.get('classname')}::{case.get('name')}")
