"""The steps that bring up a machine, and the report of made-up results."""

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from bring_up import report
from bring_up.steps import LIMIT_S, steps_on
from studies import store
from studies.runner import Outcome
from tests import preloaded
from tests.preloaded import ROOT

ERRORS = {"num": 9, "mape": 4.0, "median": 3.0, "p90": 8.0, "spearman": 0.99}
FIGURES: dict[str, dict[str, Any]] = {
    "tests": {"selection": "-m gpu tests/gpu", "passed": 40, "skipped": 2, "failed": 0},
    "hardware": {
        "lines": ["a CPU", "fingerprint 12: 8 cores"],
        "prices": "prior (prices of another CPU: no AVX-512 here)",
        "packaged": {
            "learned-a": {"is_same": True, "reasons": []},
            "learned-b": {"is_same": False, "reasons": ["no AVX-512 here", "4 cores there"]},
        },
    },
    "calibrate": {
        "num_plans": {"fitted": 80, "held_out": 20},
        "held_out_errors": {"plan, embedding cost": ERRORS},
        "packaged_errors": {"plan, embedding cost": ERRORS | {"mape": 61.5}},
        "repeatability": {"computation, 2 ranks": {"num": 5, "critical_path": 18.74}},
    },
    "policies": {"autoshard": {"best_heuristic": "size_lookup", "over_best_heuristic": 0.97}},
    "sweep": {
        "num_ranks": 2,
        "sharders": {
            "random": {"embedding_cost_ms": 12.0, "samples_per_s": 21_000.0, "prices": [None]},
            "neuroshard": {
                "embedding_cost_ms": 8.25,
                "imbalance": 1.03,
                "samples_per_s": 30_500.0,
                "prediction_error": -0.052,
                "prices": ["calibrated, within about 4 %"],
            },
        },
    },
    "benchmark": {
        "tasks": 4,
        "cost_ms over torchrec": {"neuroshard": 0.91, "torchrec": 1.0},
        "cost_ms over torchrec, 95 %": {"neuroshard": [0.88, 0.94], "torchrec": [1.0, 1.0]},
        "predicted_ms over torchrec": {"neuroshard": 0.9, "torchrec": 1.0},
        "errors of the slowest rank's computation": ERRORS,
    },
}


def outcome(step: str, **fields: Any) -> Any:
    made_up = {
        "status": "ok",
        "seconds": 30.0,
        "limit_s": 60.0,
        "device": "a CPU",
        "figures": FIGURES.get(step, {}),
        "load_average": {"before": [0.2, 0.1, 0.1]},
        "versions": {"torch": "2.13.0"},
        "commit": "0123456789abcdef",
    }
    return Outcome(step, **made_up | fields)


def page(outcomes: list[Any], *, is_rehearsal: bool = False) -> str:
    return report.report_text(outcomes, is_rehearsal=is_rehearsal)


def test_the_limits_leave_time_in_half_an_hour():
    assert LIMIT_S <= 1800 - 60
    assert sum(step.least_s for step in steps_on("cuda")) <= LIMIT_S / 2
    assert all(step.least_s <= step.limit_s < 570 for step in steps_on("cuda"))


def test_no_test_begins_when_there_is_no_time_left(tmp_path):
    """The test that runs then ends, and its line is on disk."""
    (tmp_path / "test_three.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    path = tmp_path / "cases.jsonl"
    options = ("-v", "-p", "no:cacheprovider", "-p", "bring_up.tests", f"--cases={path}")
    command = ("-m", "pytest", f"--rootdir={tmp_path}", *options)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}
    ended = []
    for time_s in (0.0, 600.0):
        done = preloaded.run(*command, f"--time-s={time_s}", str(tmp_path), env=env)
        ended.append((done.returncode, list(store.Cases(path).ended)))
    assert ended == [
        (2, ["test_three.py::test_a"]),
        (0, ["test_three.py::test_a", "test_three.py::test_b"]),
    ]
    assert "test_three.py::test_b PASSED" in done.stdout


def test_every_step_has_a_module():
    for step in steps_on("cuda"):
        assert step.commands or importlib.import_module(f"bring_up.{step.name}").run


def test_only_gpus_have_a_first_hour():
    names = {device: [step.name for step in steps_on(device)] for device in ("cpu", "cuda")}
    assert [name for name in names["cuda"] if name not in names["cpu"]] == ["gpu"]


def test_the_report_of_a_bring_up():
    text = page([outcome(step) for step in FIGURES])
    lines = text.splitlines()
    assert lines[:3] == ["# Bring-up of a CPU", "", "6 of 6 steps succeeded, in 3.0 minutes."]
    assert "40 tests passed, 0 failed and 2 were skipped (`pytest -m gpu tests/gpu`)." in lines
    assert "- packaged `learned-a`: made on this hardware" in lines
    assert "- packaged `learned-b`: a prior, because no AVX-512 here; 4 cores there" in lines
    assert "| plan, embedding cost | 61.5 | 4.0 |" in lines
    assert "measured twice differ by 18.7 % in computation, 2 ranks (5 plans)" in text
    assert "Prices of the plans: calibrated, within about 4 %." in text
    assert "| neuroshard | 8.25 | 1.03 | -5.2% | 30,500 |" in lines
    assert "| random | 12.00 | - | - | 21,000 |" in lines
    assert "| neuroshard | 0.910 | 0.880 to 0.940 | 0.900 |" in lines
    assert "| calibrate | ok | 30 | 60 | 0.2 |" in lines
    assert "| all |  | 180 |  |  |" in lines
    next_steps = lines[lines.index("## What to do next") + 2 :]
    assert [line.split(",")[0].split(" to ")[0] for line in next_steps] == [
        "- Copy the folder calibration/",
        "- Use the default sharder",
    ]
    assert "cost 9.0 % less" in next_steps[1]


def test_the_report_says_what_failed_and_how_to_go_on():
    failed = outcome("tests", status="failed", failures=["test_training::test_a"], figures={})
    late = outcome(
        "sweep", status="no time left", seconds=None, limit_s=None, headline={"needs": "60 s"}
    )
    text = page([failed, outcome("hardware"), late])
    assert "1 of 3 steps succeeded" in text
    assert "**tests: failed.** test_training::test_a" in text
    assert "**sweep: no time left.** needs 60 s" in text
    assert "- For the step tests, look at tests.log, mend the cause, and start the same" in text
    assert "- For the step sweep, start the same command again" in text
    assert "Copy the folder" not in text


def test_the_report_of_steps_without_figures():
    crashed = [outcome(step, status="failed", figures={}, device=None) for step in FIGURES]
    text = page(crashed)
    assert text.startswith("# Bring-up of this machine\n\n0 of 6 steps succeeded")
    assert "## Sweep" not in text


def test_measuring_beside_other_work_is_to_be_repeated():
    busy = {"before": [10_000.0, 0.0, 0.0]}
    loaded = [outcome(step, load_average=busy) for step in ("tests", "hardware", "calibrate")]
    assert "- Other work ran beside hardware, calibrate." in page(loaded)


def test_what_the_prices_are_worth_decides_the_advice():
    far_off = FIGURES["calibrate"] | {
        "held_out_errors": {"plan, embedding cost": ERRORS | {"mape": 23.0}}
    }
    dearer = FIGURES["benchmark"] | {
        "cost_ms over torchrec": {"neuroshard": 1.04},
        "cost_ms over torchrec, 95 %": {"neuroshard": [1.01, 1.07]},
    }
    behind = {"autoshard": FIGURES["policies"]["autoshard"] | {"over_best_heuristic": 1.08}}
    steps = {"calibrate": far_off, "policies": behind, "benchmark": dearer}
    text = page([outcome(step, figures=figures) for step, figures in steps.items()])
    assert "off by 23.0 %; `dlrm-calibrate minutes=10` refines" in text
    assert "`dlrm-train-policy policy=autoshard costs=predicted`" in text
    assert "1.040 times those of TorchRec's planner" in text


def test_few_tasks_do_not_tell_sharders_apart():
    unclear = {"cost_ms over torchrec, 95 %": {"neuroshard": [0.8, 1.02]}}
    text = page([outcome("benchmark", figures=FIGURES["benchmark"] | unclear)])
    assert "cost 0.910 times those of TorchRec's planner, which so few" in text


def test_a_rehearsal_says_so(tmp_path):
    (tmp_path / "settings.json").write_text(json.dumps({"small": True, "device": "cpu"}))
    line = report.write_report(tmp_path, [outcome(step) for step in FIGURES])
    assert line == f"report: {tmp_path / 'report.md'}"
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Rehearsal of a bring-up of a CPU")
    assert "Run the command without --small" in text
    assert "Copy the folder" not in text


SEES_THE_FIRST = """
from pathlib import Path
def test_first():
    pass
def test_second():
    [line] = [line for line in Path("cases").read_text().splitlines() if '"case"' in line]
    assert "test_first" in line
"""


def test_a_test_is_written_before_the_next_begins(tmp_path):
    """The end of all tests may be an hour away, and a kill comes before it."""
    (tmp_path / "test_lines.py").write_text(SEES_THE_FIRST)
    plugins = ("-p", "no:randomly", "-p", "no:cacheprovider", "-p", "bring_up.tests")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--cases=cases", "test_lines.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "cases").read_text().count('"outcome": "passed"') == 2
