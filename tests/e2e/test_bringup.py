"""scripts/bringup.py, rehearsed on the CPU as far as the hardware and the report."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests import preloaded
from tests.e2e.runs import ROOT, environment

TESTS = ("--small", "--steps", "tests")
SCRIPT = ROOT / "scripts" / "bringup.py"


def bring_up(out: Path, *options: str, exit_code: int | None = 0) -> preloaded.Ended:
    return preloaded.run(str(SCRIPT), str(out), *options, env=environment(), exit_code=exit_code)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rehearsal")
    bring_up(out, "--small", "--steps", "hardware")
    return out


def test_hardware_is_detected_and_compared(rehearsal):
    written = json.loads((rehearsal / "hardware.json").read_text())
    name, fingerprint, probe = written["figures"]["lines"]
    assert name == written["device"]
    assert fingerprint.startswith("fingerprint ")
    assert "random gather" in probe
    packaged = written["figures"]["packaged"]
    assert any(name.startswith("learned-") for name in packaged)
    assert all(match["is_same"] == (match["reasons"] == []) for match in packaged.values())
    is_same = any(match["is_same"] for name, match in packaged.items() if "learned-" in name)
    assert written["figures"]["prices"].startswith("calibrated" if is_same else "prior")
    report = (rehearsal / "report.md").read_text()
    assert fingerprint in report
    assert "| hardware | ok |" in report


def test_what_succeeded_is_not_run_again(rehearsal):
    before = (rehearsal / "hardware.json").stat().st_mtime_ns
    (rehearsal / "report.md").unlink()
    done = bring_up(rehearsal, "--small", "--steps", "hardware,policies", exit_code=1)
    assert "hardware: ok, earlier" in done.stdout
    assert (rehearsal / "hardware.json").stat().st_mtime_ns == before
    report = (rehearsal / "report.md").read_text()
    assert "**policies: no files.** needs calibration/learned-*.safetensors" in report


def test_a_kill_loses_no_finished_test(tmp_path):
    command = [str(SCRIPT), str(tmp_path), *TESTS]
    killed = preloaded.start(*command, env=environment(), stdout=None, own_process=True)
    cases = tmp_path / "tests.cases.jsonl"
    while not (cases.exists() and cases.read_text().count('"failures": []}\n') >= 3):
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()

    bring_up(tmp_path, *TESTS, "--limit-s", "1", exit_code=1)
    report = (tmp_path / "report.md").read_text()
    counts = re.search(r"\*\*tests: no time left.*\n\nOf tests, (\d+) of (\d+) cases are", report)
    assert counts, report
    finished, planned = map(int, counts.groups())
    assert 3 <= finished < planned

    done = bring_up(tmp_path, *TESTS)
    assert f"tests: goes on after {finished} finished cases" in done.stdout
    assert f"{planned - finished} passed, {finished} deselected" in (
        (tmp_path / "tests.log").read_text()
    )
    written = json.loads((tmp_path / "tests.json").read_text())
    assert written["figures"]["passed"] + written["figures"]["skipped"] == planned
    assert not cases.exists()


def test_another_kind_of_run_needs_another_folder(rehearsal):
    done = bring_up(rehearsal, exit_code=2)
    assert "has steps with other settings" in done.stderr
