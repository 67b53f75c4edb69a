"""scripts/bringup.py, rehearsed on the CPU as far as the hardware and the report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, environment

TIMEOUT_S = 300
"""A step that takes longer hangs."""


def bring_up(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bringup.py"), str(out), *options],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rehearsal")
    done = bring_up(out, "--small", "--steps", "hardware")
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_hardware_is_detected_and_compared(rehearsal: Path) -> None:
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


def test_what_succeeded_is_not_run_again(rehearsal: Path) -> None:
    before = (rehearsal / "hardware.json").stat().st_mtime_ns
    (rehearsal / "report.md").unlink()
    done = bring_up(rehearsal, "--small", "--steps", "hardware,policies")
    assert "hardware: ok, earlier" in done.stdout
    assert (rehearsal / "hardware.json").stat().st_mtime_ns == before
    assert done.returncode == 1
    report = (rehearsal / "report.md").read_text()
    assert "**policies: no files.** needs calibration/learned-*.safetensors" in report


def test_another_kind_of_run_needs_another_folder(rehearsal: Path) -> None:
    done = bring_up(rehearsal)
    assert done.returncode == 2
    assert "has steps with other settings" in done.stderr
