"""Measure this machine from the start and fit a cost model to it: the command `dlrm-calibrate`.

dlrm-calibrate minutes=10 fit.num_steps=2000

Two minutes, the default, are enough to move the packaged model to this machine; ten refine it.
Both steps use their default files in `calibration/`. Overrides that begin with `fit.` are for
`dlrm-fit-cost-model`, all others for `dlrm-collect-costs`. Under torchrun or TorchX all ranks
measure, so that exchanges between hosts are among what is measured, and rank 0 fits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.errors import ConfigError, check_number

DEFAULT_MINUTES = 2.0
SHORT_MINUTES = 5.0
"""Below this, each plan is measured for less time, so that there are more plans."""

SHORT_MEASURE = ("iterations=8", "warmup=1", "num_batches=2", "time_budget_s=0.1")
REST_S = 30.0
"""Time for the start of the ranks and for the fit, which is not the collection's."""

COLLECTED = (Path("calibration/costs.parquet"), Path("calibration/costs.json"))
"""Files of a finished collection; an interrupted one keeps its samples elsewhere."""


def main() -> int:
    """Run both steps, and return the exit code of the first that fails."""
    with exit_codes():
        overrides = sys.argv[1:]
        if overrides in (["--help"], ["-h"]):
            print(__doc__)
            return 0
        minutes = _minutes(overrides)
        overrides = [override for override in overrides if not override.startswith("minutes=")]
        for override in overrides:
            if override.startswith(("out=", "costs=")):
                raise ConfigError(
                    f"{override!r}: the files of a calibration have fixed names; for others, run "
                    "dlrm-collect-costs and dlrm-fit-cost-model"
                )
        is_rank_zero = os.environ.get("RANK", "0") == "0"
        if is_rank_zero:
            for path in COLLECTED:
                path.unlink(missing_ok=True)
        fit_overrides = [override for override in overrides if override.startswith("fit.")]
        collection_overrides = [override for override in overrides if override not in fit_overrides]
        collection_overrides = [*time_overrides(minutes), *collection_overrides]
        failed = _run("collect_costs", collection_overrides)
        return failed or (_run("fit_cost_model", fit_overrides) if is_rank_zero else 0)
    raise AssertionError("exit_codes ends the process after an error")


def time_overrides(minutes: float) -> list[str]:
    """Return the overrides of a collection for a calibration of so many minutes."""
    budget_s = max(60 * minutes - REST_S, REST_S)
    overrides = [f"collect.time_budget_s={budget_s:g}"]
    if minutes < SHORT_MINUTES:
        overrides += [f"collect.measure.{override}" for override in SHORT_MEASURE]
    return overrides


def _minutes(overrides: list[str]) -> float:
    given = [override for override in overrides if override.startswith("minutes=")]
    if not given:
        return DEFAULT_MINUTES
    text = given[-1].removeprefix("minutes=")
    try:
        minutes = float(text)
    except ValueError:
        raise ConfigError(f"minutes is {text!r}, must be a number") from None
    check_number("minutes", minutes, above=True)
    return minutes


def _run(command: str, overrides: list[str]) -> int:
    """Run one command in a process of its own, which frees its memory, and return its exit code."""
    module = f"dlrm_sharded.commands.{command}"
    return subprocess.run([sys.executable, "-m", module, *overrides], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
