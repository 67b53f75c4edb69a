"""Runs those steps of the first hour on a GPU that say whether training on it is right and fast.

The other steps of the first hour collect, fit and measure, as the bring-up does itself.
"""

from __future__ import annotations

import sys

from dlrm_sharded.files.json_files import read_json_object
from studies.runner import ROOT
from studies.study import StudyRun

STEPS = "environment,kernels,train,mlperf"
LAST_S = 10
"""Time in which the script ends after its last step."""


def run(study: StudyRun) -> None:
    study.device()
    out = study.out / "gpu"
    command = [sys.executable, str(ROOT / "scripts" / "first_gpu.py"), str(out)]
    limit_s = max(study.seconds_left - LAST_S, 1.0)
    options = [f"--steps={STEPS}", f"--limit-s={limit_s}", *(["--small"] if study.small else [])]
    study.checked_command([*command, *options], noun="first_gpu.py")
    if (out / "summary.json").exists():
        steps = read_json_object(out / "summary.json", noun="summary")["steps"]
        study.record("steps", {name: steps[name] for name in STEPS.split(",") if name in steps})
        study.show(**{name: entry["status"] for name, entry in steps.items()})
