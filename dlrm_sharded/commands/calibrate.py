"""Measure this machine from the start and fit a cost model to it: the command `dlrm-calibrate`.

dlrm-calibrate minutes=10 fit.num_steps=2000
dlrm-calibrate task=task.json
dlrm-calibrate policies=true

Two minutes, the default, are enough to move the packaged model to this machine; ten refine it. With
a task, a third of the measured plans are ranks of plans between which its prices decide.
With `policies=true`, the packaged policies are then re-tuned to the model, each in about a minute.
All steps use their default files in `calibration/`. Overrides that begin with `fit.` are for
`dlrm-fit-cost-model`, all others for `dlrm-collect-costs`. Under torchrun or TorchX all ranks
measure, so that exchanges between hosts are among what is measured, and rank 0 does the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import Keys, read_words
from dlrm_sharded.files.errors import ConfigError, check_number
from dlrm_sharded.hardware.artifact_kinds import RETUNE
from dlrm_sharded.plans.task import read_task
from dlrm_sharded.ranks.process import LAUNCHER_VARIABLE

DEFAULT_MINUTES = 2.0
SHORT_MINUTES = 5.0
"""Below this, each plan is measured for less time, so that there are more plans."""

SHORT_REPEAT_EVERY = 10
"""More plans are measured twice, as a few say nothing about how well measurements repeat."""

SHORT_MEASURE = ("iterations=8", "warmup=1", "num_batches=2", "time_budget_s=0.1")
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables by which torchrun makes a process a rank of a job."""

REST_S = 30.0
"""Time for the start of the ranks and for the fit, which is not the collection's."""

POLICIES = ("autoshard", "dreamshard")
OPTIMIZER = "collect.optimizer="
COLLECTED = (Path("calibration/costs.parquet"), Path("calibration/costs.json"))
"""Files of a finished collection; an interrupted one keeps its samples elsewhere."""


def main() -> int:
    """Run all steps, and return the exit code of the first that fails."""
    with exit_codes():
        overrides = sys.argv[1:]
        if overrides in (["--help"], ["-h"]):
            print(__doc__)
            return 0
        keys: Keys = {
            "minutes": (float, DEFAULT_MINUTES),
            "policies": (_flag, False),
            "task": (str, None),
        }
        own = [word for word in overrides if word.partition("=")[0] in keys]
        asked = read_words(__doc__, keys, arguments=own)
        check_number("minutes", asked.minutes, above=True)
        overrides = [override for override in overrides if override not in own]
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
        of_task = [] if asked.task is None else task_overrides(asked.task)
        collection_overrides = [*time_overrides(asked.minutes), *of_task, *collection_overrides]
        failed = _run("collect_costs", collection_overrides)
        if failed or not is_rank_zero:
            return failed
        return _run("fit_cost_model", fit_overrides) or _retune_policies(
            retuning_overrides(collection_overrides), asked.policies
        )
    raise AssertionError("exit_codes ends the process after an error")


def time_overrides(minutes: float) -> list[str]:
    """Return the overrides of a collection for a calibration of so many minutes."""
    budget_s = max(60 * minutes - REST_S, REST_S)
    overrides = [f"collect.time_budget_s={budget_s:g}"]
    if minutes < SHORT_MINUTES:
        overrides += [f"collect.measure.{override}" for override in SHORT_MEASURE]
        overrides.append(f"collect.repeat_every={SHORT_REPEAT_EVERY}")
    return overrides


def task_overrides(path: str) -> list[str]:
    """Return the overrides of a collection for the task of a file, and for its optimizer.

    Raises:
        ConfigError: the file is no task.
    """
    optimizer = read_task(path).optimizer
    # quotes for Hydra, as paths may have any characters
    return [f"collect.task={json.dumps(path)}", *([OPTIMIZER + optimizer] if optimizer else [])]


def retuning_overrides(collection_overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a training of policies for the optimizer of a collection."""
    optimizers = [
        override.removeprefix("collect.")
        for override in collection_overrides
        if override.startswith(OPTIMIZER)
    ]
    return [*RETUNE.split(), *optimizers[-1:]]


def _retune_policies(overrides: Sequence[str], policies: bool) -> int:
    """Adapt the packaged policies to the fitted model, or else say which command does so."""
    if not policies:
        print(
            "to re-tune a packaged policy to this model, in about a minute: dlrm-train-policy "
            f"policy=dreamshard {' '.join(overrides)}; with policies=true, a calibration does so "
            f"for {' and '.join(POLICIES)}"
        )
        return 0
    codes = (
        _run("train_policy", [f"policy={policy}", *overrides], alone=True) for policy in POLICIES
    )
    return next((code for code in codes if code), 0)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def _run(command: str, overrides: list[str], *, alone: bool = False) -> int:
    """Run one command in a process of its own, which frees its memory, and return its exit code.

    Args:
        alone: without the other ranks of this job, if there are any.
    """
    module = f"dlrm_sharded.commands.{command}"
    environment = {
        key: value for key, value in os.environ.items() if not (alone and key in RANK_VARIABLES)
    }
    environment[LAUNCHER_VARIABLE] = str(os.getpid())  # the command dies with this process
    arguments = [sys.executable, "-m", module, *overrides]
    return subprocess.run(arguments, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
