"""The trainer's loop on DLRM-DCNv2, with and without each of its measures."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import re
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.ranks.distributed import Rank, process_group
from dlrm_sharded.training.trainer import Trainer, TrainerConfig
from first_hour.dcnv2 import build, dcnv2_dataset, train_stream
from studies.runner import ROOT
from studies.study import StudyRun

NUM_STEPS, SMALL_NUM_STEPS = {8192: 60, 65_536: 30}, {32: 8}
"""Steps of a training by batch size: MLPerf's share of one of 8 ranks, and the global one."""

MAX_ROWS = "data.max_rows=1000000"
"""Tables of 5 GiB, which are built quickly; the loop's time does not depend on it much."""

CASE_S, COMPILED_CASE_S, SMALL_CASE_S = 12, 45, 5
BARE_S = 40
NEW_DATA = ("data.cache_gib=0", "data.pregenerate=false")
"""Batches that are generated when they are needed, as files are read."""


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of a training; those that are missing are the experiment's."""

    data: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)


AS_IT_IS = "as it is"
CASES = {
    AS_IT_IS: Case(),
    "without reading ahead": Case(trainer={"prefetch_batches": 0}),
    "new data": Case(data=NEW_DATA),
    "new data, without reading ahead": Case(data=NEW_DATA, trainer={"prefetch_batches": 0}),
    "pipeline base": Case(trainer={"pipeline": "base"}),
    "logs of every step": Case(trainer={"log_every_steps": 1}),
    "fp32": Case(model=("model.bf16=false",)),
    "fp32, without TF32": Case(model=("model.bf16=false",), trainer={"tf32": False}),
}
COMPILED = Case(model=("model.compile_mode=default",))


def run(study: StudyRun) -> None:
    device = study.device()
    num_steps = SMALL_NUM_STEPS if study.small else NUM_STEPS
    labels = [f"{batch_size}, {name}" for batch_size in num_steps for name in CASES]
    if not study.small:
        labels.append(f"{next(iter(num_steps))}, compiled")
    study.cases.plan(labels)
    with process_group() as rank:
        bench = LoopBench(study, rank)
        for batch_size, num in num_steps.items():
            for name, case in CASES.items():
                bench.measure(name, case, batch_size, num, seconds=CASE_S)
        if study.small:
            study.record("compiled", "left out: compiling takes longer than a rehearsal")
        else:
            batch_size, num = next(iter(num_steps.items()))
            bench.measure("compiled", COMPILED, batch_size, num, seconds=COMPILED_CASE_S)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if study.has_time("trainer over bare loop", SMALL_CASE_S if study.small else BARE_S):
        _compare_with_bare(study)


class LoopBench:
    """Trains in the same process under one case after the other."""

    def __init__(self, study: StudyRun, rank: Rank) -> None:
        self._step = study
        self._rank = rank
        self._dataset = functools.cache(self._new_dataset)
        self._ratios: dict[int, dict[str, float]] = {}

    def measure(
        self, name: str, case: Case, batch_size: int, num_steps: int, *, seconds: float
    ) -> None:
        """Record the throughput under a case, unless less time is left than it takes."""
        step, label = self._step, f"{batch_size}, {name}"
        checked = functools.partial(self._checked, label, case, batch_size, num_steps)
        figures = step.case(label, checked, seconds=SMALL_CASE_S if step.small else seconds)
        if figures is None:
            return
        step.record(label, figures)
        if "error" in figures:
            return
        ratios = self._ratios.setdefault(batch_size, {})
        ratios[name] = figures["step_ms"]
        first_ms = ratios.get(AS_IT_IS, math.nan)
        others = [f"{key} {ms / first_ms:.2f} x" for key, ms in ratios.items() if key != AS_IT_IS]
        step.show(**{str(batch_size): ", ".join([f"{first_ms:.1f} ms", *others])})

    def _checked(self, label: str, case: Case, batch_size: int, num_steps: int) -> dict[str, Any]:
        """Train, and return the figures or the error."""
        try:
            return self._trained(case, batch_size, num_steps)
        except Exception:  # the other cases may work
            traceback.print_exc()
            error = traceback.format_exc().splitlines()[-1]
            self._step.check(False, f"{label}: {error}")
            return {"error": error}

    def _new_dataset(self, batch_size: int, data: tuple[str, ...]) -> SyntheticDataset:
        rows = () if self._step.small else (MAX_ROWS,)
        return dcnv2_dataset(batch_size, *rows, *data, small=self._step.small)

    def _trained(self, case: Case, batch_size: int, num_steps: int) -> dict[str, Any]:
        gc.collect()  # the sharded modules of the last case are in reference cycles
        dataset = self._dataset(batch_size, case.data)
        built = build(dataset, self._rank.device, *case.model, small=self._step.small)
        data_wait_ms: list[float] = []

        def log_scalar(tag: str, value: float, step: int) -> None:
            if tag == "train/data_wait_ms":
                data_wait_ms.append(value)

        settings = {"num_eval_batches": 0, "pipeline": "sparse_dist", **case.trainer}
        config = TrainerConfig(num_steps=num_steps, **settings)
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
        result = Trainer(
            built.sharded,
            optimizer=built.optimizer,
            lr_scheduler=LambdaLR(built.optimizer, built.optimizer_config.schedule.factor),
            train_stream=train_stream(dataset),
            eval_stream=BatchStream(dataset, "val"),
            config=config,
            batch_size=batch_size,
            rank=self._rank,
            log_scalar=log_scalar,
        ).run()
        figures = dataclasses.asdict(result)
        del figures["evaluation"]
        return figures | {"data_wait_ms": data_wait_ms[-1]}


def _compare_with_bare(study: StudyRun) -> None:
    """Run the benchmark `loop` on one rank, and keep what it prints of the ratio."""
    script = str(ROOT / "scripts" / "benchmark.py")
    sizes = (
        ("--steps", "10", "--rounds", "1") if study.small else ("--steps", "60", "--rounds", "4")
    )
    done = study.command([sys.executable, script, "loop", "--ranks", "1", *sizes])
    study.check(done.exit_code == 0, f"the benchmark `loop` ended with exit code {done.exit_code}")
    if found := re.search(r"median ([\d.]+)", done.output):
        study.record("trainer over bare loop", float(found[1]))
        study.show(**{"trainer over bare loop": found[1]})
