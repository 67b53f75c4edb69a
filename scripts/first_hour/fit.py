"""Fits a cost model to what `collect` measured, with `dlrm-fit-cost-model`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dlrm_sharded.cost.learned import KIND
from dlrm_sharded.hardware.artifact import ARTIFACT_SUFFIX, CALIBRATED, HEADER
from first_hour.collect import COSTS, finish_collection
from studies.processes import module_command
from studies.study import StudyRun

FIT = "dlrm_sharded.commands.fit_cost_model"
HEADLINE = ("forward computation", "backward computation", "plan, embedding cost")
"""Quantities whose mean errors on held-out plans are shown."""

META = ("hardware", "num_plans", "held_out_errors", "repeatability", "ranges", "load_average")


def run(study: StudyRun) -> None:
    if not COSTS.exists():
        # it was killed; to continue it for no time makes a file of its plans
        finish_collection(study, time_budget_s=0.001)
    sizes = ("fit.num_steps=100",) if study.small else ()
    command = module_command(FIT, f"costs={COSTS}", f"out={CALIBRATED}", *sizes)
    meta = fitted_meta(study, command, noun="fit", keys=META)
    if meta is None:
        return
    errors = meta["held_out_errors"]
    study.show(
        **{name: f"{errors[name]['mape']:.1f} %" for name in HEADLINE if name in errors},
        plans=str(meta["num_plans"]["fitted"]),
    )


def fitted_meta(
    study: StudyRun, command: Sequence[str], *, noun: str, keys: Sequence[str]
) -> dict[str, Any] | None:
    """Run a command that fits a cost model, record how it ended, and read the artefact's header.

    It is None if the command failed.

    Args:
        noun: what to call the command in a message.
        keys: entries of the header to record.
    """
    if study.checked_command(command, noun=f"the {noun}").exit_code:
        return None
    [path] = CALIBRATED.glob(f"{KIND}-*{ARTIFACT_SUFFIX}")
    meta = artefact_meta(path)
    study.record("artefact", str(path))
    for key in keys:
        study.record(key, meta[key])
    return meta


def artefact_meta(path: Path) -> dict[str, Any]:
    """Return the description in the header of an artefact."""
    with safe_open(path, framework="numpy") as file:
        meta: dict[str, Any] = json.loads(file.metadata()[HEADER])
    return meta
