"""Measure this machine from the start and fit a cost model to it: the command `dlrm-calibrate`.

dlrm-calibrate collect.time_budget_s=300 fit.num_steps=2000

Both steps use their default files in `calibration/`. Overrides that begin with `fit.` are for
`dlrm-fit-cost-model`, all others for `dlrm-collect-costs`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.errors import ConfigError

COLLECTED = (Path("calibration/costs.parquet"), Path("calibration/costs.json"))
"""Files of a finished collection; an interrupted one keeps its samples elsewhere."""


def main() -> int:
    """Run both steps, and return the exit code of the first that fails."""
    with exit_codes():
        overrides = sys.argv[1:]
        if overrides in (["--help"], ["-h"]):
            print(__doc__)
            return 0
        for override in overrides:
            if override.startswith(("out=", "costs=")):
                raise ConfigError(
                    f"{override!r}: the files of a calibration have fixed names; for others, run "
                    "dlrm-collect-costs and dlrm-fit-cost-model"
                )
        for path in COLLECTED:
            path.unlink(missing_ok=True)
        fit_overrides = [override for override in overrides if override.startswith("fit.")]
        collection_overrides = [override for override in overrides if override not in fit_overrides]
        return _run("collect_costs", collection_overrides) or _run("fit_cost_model", fit_overrides)
    raise AssertionError("exit_codes ends the process after an error")


def _run(command: str, overrides: list[str]) -> int:
    """Run one command in a process of its own, which frees its memory, and return its exit code."""
    module = f"dlrm_sharded.commands.{command}"
    return subprocess.run([sys.executable, "-m", module, *overrides], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
