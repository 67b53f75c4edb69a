"""Re-tunes both policies to the costs that the calibrated model predicts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from dlrm_sharded.hardware.artifact import ARTIFACT_SUFFIX, CALIBRATED
from dlrm_sharded.hardware.artifact_kinds import RETUNE
from first_hour.fit import artefact_meta
from studies.processes import module_command
from studies.study import StudyRun

POLICIES = ("autoshard", "dreamshard")
TRAIN = ("dlrm_sharded.commands.train_policy", *RETUNE.split())
SMALL_SIZES = ("schedule.num_rounds=1", "schedule.plans_per_round=4", "num_validation_tasks=2")


def run(study: StudyRun) -> None:
    study.device(or_cpu=True)
    sizes = SMALL_SIZES if study.small else ()
    works = {policy: functools.partial(_trained, study, policy, sizes) for policy in POLICIES}
    for policy, figures in study.each(works):
        over_best = f"{figures['over_best_heuristic']:.3f}"
        study.show(**{f"{policy} over {figures['best_heuristic']}": over_best})


def _trained(study: StudyRun, policy: str, sizes: Sequence[str]) -> dict[str, Any] | None:
    """Train a policy, and compare it with the best heuristic; nothing is known if that fails."""
    done = study.command(module_command(*TRAIN, f"policy={policy}", *sizes))
    study.check(done.exit_code == 0, f"{policy}: exit code {done.exit_code}")
    if done.exit_code:
        return None
    [path] = CALIBRATED.glob(f"{policy}-*{ARTIFACT_SUFFIX}")
    scores = artefact_meta(path)["scores_ms"]
    heuristics = {name: score for name, score in scores.items() if name != policy}
    best = min(heuristics, key=lambda name: heuristics[name])
    over_best = scores[policy] / heuristics[best]
    return {"artefact": str(path), "best_heuristic": best, "over_best_heuristic": over_best} | {
        "seconds": done.seconds
    }
