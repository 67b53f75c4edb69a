"""Bring up a new machine: tests, hardware, calibration, policies, a sweep, a benchmark, a report.

python scripts/bringup.py                                  all steps, in bringup/
python scripts/bringup.py OUT --steps hardware,calibrate   some of them
python scripts/bringup.py OUT --limit-s 570                what fits into ten minutes
python scripts/bringup.py REHEARSAL --small                small sizes

OUT/report.md is the report, OUT/<step>.json has the figures of a step and OUT/<step>.log its
output. What succeeded is not run again, neither a step nor a case of one: the same command
continues where a shorter or a killed one ended. The exit code is 0 if all steps succeeded, now or
before.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bring_up.report import write_report
from bring_up.steps import LIMIT_S, steps_on
from dlrm_sharded.ranks.gpus import visible_gpus
from studies.command_line import run_steps


def main() -> int:
    device = "cuda" if visible_gpus() else "cpu"
    return run_steps(
        steps_on(device),
        package="bring_up",
        description=__doc__,
        limit_s=LIMIT_S,
        default_out=Path("bringup"),
        settings={"device": device},
        report=write_report,
    )


if __name__ == "__main__":
    sys.exit(main())
