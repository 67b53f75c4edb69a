"""Training runs on one rank, as users start them: with and without torchrun, and all optimizers."""

from __future__ import annotations

import functools
import shutil
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.runs.result import RunResult, read_result
from studies.processes import module_command
from studies.study import StudyRun

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m")
TRAIN = "dlrm_sharded.train"
LEAST_AUROC = 0.6
LOSS_TOLERANCE = 1e-3
"""Largest relative difference of the pipelines' losses. They do the same sums in other orders."""

SIZES = ("trainer.num_steps=200", "trainer.eval_every_steps=20", "data.num_val_batches=4")
ADAM = ("optimizer=adam", "trainer.num_steps=20", "data.num_val_batches=4", "trainer.tf32=false")
"""Adam divides by the root of small sums, so that a rounding more or less grows with every step."""

SMALL_SIZES = (
    *("batch_size=256", "data.max_rows=500", "trainer.num_steps=80"),
    *("trainer.eval_every_steps=20", "data.num_val_batches=4", "measure.iterations=3"),
    *("sharder=size_lookup", "cost_model=none"),
)
BASE, SPARSE_DIST = (f"trainer.pipeline={name}" for name in ("base", "sparse_dist"))

LEAST_S = 25
"""Time of a run on a GPU; most of it is loading libraries and opening the device."""

KEYS = ("loss", "auroc", "step_ms", "samples_per_s_overall", "peak_gib", "embedding_cost_ms")


@dataclass(frozen=True, slots=True)
class Case:
    """A training run.

    Args:
        least_auroc: what it must reach; a run of few steps has learned nothing yet.
    """

    overrides: tuple[str, ...]
    with_torchrun: bool = False
    least_auroc: float = LEAST_AUROC


def run(study: StudyRun) -> None:
    on_cuda = study.device().type == "cuda"
    sizes = SMALL_SIZES if study.small else SIZES
    cases = {
        "adagrad, base": Case((*sizes, BASE)),
        "adagrad, sparse_dist": Case((*sizes, SPARSE_DIST), with_torchrun=True),
    }
    if on_cuda:
        exchange = (*sizes, SPARSE_DIST, "exchange_precision=bf16")
        cases |= {
            "exchange in bf16": Case(exchange, with_torchrun=True),
            "adam, base": Case((*ADAM, BASE), with_torchrun=True, least_auroc=0.0),
            "adam, sparse_dist": Case((*ADAM, SPARSE_DIST), least_auroc=0.0),
        }
    else:
        study.record("adam, base", "not fused on a CPU")
        study.record("exchange in bf16", "gloo does not exchange bf16")
    works = {name: functools.partial(_trained, study, name, case) for name, case in cases.items()}
    results = dict(study.each(works, seconds=10 if study.small else LEAST_S))
    for optimizer in ("adagrad", "adam"):
        losses = [
            result["loss"]
            for pipeline in ("base", "sparse_dist")
            if (result := results.get(f"{optimizer}, {pipeline}")) and result["loss"] is not None
        ]
        if len(losses) == 2:
            difference = abs(losses[0] / losses[1] - 1)
            study.record(f"{optimizer}, difference of the pipelines' losses", difference)
            study.check(
                difference <= LOSS_TOLERANCE,
                f"{optimizer}: the loss is {losses[0]} with base and {losses[1]} with sparse_dist",
            )
    study.show(
        **{
            name: f"AUROC {result['auroc']:.3f}"
            for name, result in results.items()
            if result["auroc"]
        }
    )


def _trained(study: StudyRun, name: str, case: Case) -> dict[str, Any]:
    """Train, check the result, and return its figures."""
    folder = study.out / "train" / name.replace(", ", "_").replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier try
    module, *arguments = (*TORCHRUN, TRAIN) if case.with_torchrun else (TRAIN,)
    done = study.command(
        module_command(module, *arguments, f"hydra.run.dir={folder}", *case.overrides)
    )
    result = read_result(folder) or RunResult()
    figures: dict[str, Any] = {key: getattr(result, key) for key in KEYS}
    study.check(done.exit_code == 0, f"{name}: exit code {done.exit_code}")
    study.check(
        result.auroc is not None and result.auroc > case.least_auroc,
        f"{name}: AUROC is {result.auroc}, not above {case.least_auroc}",
    )
    return (
        figures
        | {
            "with_torchrun": case.with_torchrun,
            "exit_code": done.exit_code,
            "seconds": done.seconds,
        }
        | {"device": result.device, "warnings": done.warnings}
    )
