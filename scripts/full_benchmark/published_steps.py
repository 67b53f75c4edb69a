"""MLPerf's published steps beside those that the priors of GPUs predict."""

from __future__ import annotations

import functools

from benchmarks.compared import quiet
from benchmarks.priors import MLPERF_STEPS, MlperfStep, predicted_step
from full_benchmark.sizes import FULL, SMALL
from studies.study import Case, Row, StudyRun


def run(study: StudyRun) -> None:
    sizes = SMALL if study.small else FULL
    cases = (
        Case(f"{step.num_gpus} {step.gpu} {step.batch_size}", functools.partial(_run, step))
        for step in MLPERF_STEPS[: sizes.published_steps]
    )
    study.rows(cases, "predicted")


def _run(step: MlperfStep) -> list[Row]:
    quiet()
    found = predicted_step(step)
    return [
        {
            "gpu": step.gpu,
            "num_gpus": step.num_gpus,
            "batch_size": step.batch_size,
            "published_ms": step.measured_ms,
            "predicted_ms": found.total_ms,
            "error": found.error,
            "dense_ms": found.dense_ms,
            "lookups_ms": found.lookups_ms,
            "exchanges_ms": found.exchanges_ms,
        }
    ]
