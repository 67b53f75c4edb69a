"""Measures what sharders' plans cost under the calibrated model, on a few tasks of a benchmark."""

from __future__ import annotations

from first_hour import measured
from studies.study import StudyRun

SHARDERS = (*measured.SHARDERS, "autoshard")
NUM_TASKS, SMALL_NUM_TASKS = 8, 1


def run(study: StudyRun) -> None:
    num_tasks = SMALL_NUM_TASKS if study.small else NUM_TASKS
    measured.measure(study, study.device(or_cpu=True), SHARDERS, num_tasks=num_tasks)
