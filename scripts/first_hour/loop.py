"""The trainer's loop on DLRM-DCNv2, with and without each of its measures."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.loop import quartiles
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.training.trainer import TrainerConfig
from first_hour.dcnv2 import build, dcnv2_dataset
from studies.on_ranks import rows_on_ranks
from studies.study import StudyRun

NUM_STEPS, SMALL_NUM_STEPS = {8192: 60, 65_536: 30}, {32: 8}
"""Steps of a training by batch size: MLPerf's share of one of 8 ranks, and the global one."""

MAX_ROWS = "data.max_rows=1000000"
"""Tables of 5 GiB, which are built quickly; the loop's time does not depend on it much."""

CASE_S, COMPILED_CASE_S, SMALL_CASE_S = 12, 45, 5
BARE_S = 40
NEW_DATA = ("data.cache_gib=0", "data.pregenerate=false")
"""Batches that are generated when they are needed, as files are read."""

OVER_BARE = "trainer over bare loop"


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of a training; those that are missing are the experiment's."""

    data: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)


AS_IT_IS, COMPILED = "as it is", "compiled"
CASES = {
    AS_IT_IS: Case(),
    "without reading ahead": Case(trainer={"prefetch_batches": 0}),
    "new data": Case(data=NEW_DATA),
    "new data, without reading ahead": Case(data=NEW_DATA, trainer={"prefetch_batches": 0}),
    "pipeline base": Case(trainer={"pipeline": "base"}),
    "logs of every step": Case(trainer={"log_every_steps": 1}),
    "fp32": Case(model=("model.bf16=false",)),
    "dense graph": Case(model=("model.dense_graph=true",)),
    "fp32, without TF32": Case(model=("model.bf16=false",), trainer={"tf32": False}),
}


def run(study: StudyRun) -> None:
    device = study.device()
    num_steps = SMALL_NUM_STEPS if study.small else NUM_STEPS
    dataset_of = functools.cache(functools.partial(_dataset, study.small))
    works = {
        f"{batch_size}, {name}": functools.partial(
            _trained, dataset_of, case, batch_size, num, device, small=study.small
        )
        for batch_size, num in num_steps.items()
        for name, case in CASES.items()
    }
    if study.small:
        study.record(COMPILED, "left out: compiling takes longer than a rehearsal")
    else:
        batch_size, num = next(iter(num_steps.items()))
        compiled = Case(model=("model.compile_mode=default",))
        works[f"{batch_size}, {COMPILED}"] = functools.partial(
            _trained, dataset_of, compiled, batch_size, num, device, small=False
        )
    step_ms: dict[str, dict[str, float]] = {}
    with process_group():
        for label, figures in study.each(works, seconds=_seconds(study.small), goes_on=True):
            size, _, name = label.partition(", ")
            of_size = step_ms.setdefault(size, {})
            of_size[name] = figures["step_ms"]
            first_ms = of_size.get(AS_IT_IS, math.nan)
            others = [f"{key} {ms / first_ms:.2f} x" for key, ms in of_size.items()][1:]
            study.show(**{size: ", ".join([f"{first_ms:.1f} ms", *others])})
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if study.has_time(OVER_BARE, SMALL_CASE_S if study.small else BARE_S):
        steps, rounds = (10, 1) if study.small else (60, 4)
        rows = rows_on_ranks("benchmarks.loop", 1, steps=steps, rounds=rounds)
        _, median, _ = quartiles(rows)["trainer"]
        study.record(OVER_BARE, median)
        study.show(**{OVER_BARE: f"{median:.4f}"})


def _seconds(small: bool) -> Any:
    if small:
        return SMALL_CASE_S
    return lambda label: COMPILED_CASE_S if COMPILED in label else CASE_S


def _dataset(small: bool, batch_size: int, data: tuple[str, ...]) -> SyntheticDataset:
    return dcnv2_dataset(batch_size, *(() if small else (MAX_ROWS,)), *data, small=small)


def _trained(
    dataset_of: Any,
    case: Case,
    batch_size: int,
    num_steps: int,
    device: torch.device,
    *,
    small: bool,
) -> dict[str, Any]:
    gc.collect()  # the sharded modules of the last case are in reference cycles
    dataset = dataset_of(batch_size, case.data)
    built = build(dataset, device, *case.model, small=small)
    data_wait_ms: list[float] = []

    def log_scalar(tag: str, value: float, step: int) -> None:
        if tag == "train/data_wait_ms":
            data_wait_ms.append(value)

    settings = {"num_eval_batches": 0, "pipeline": "sparse_dist", **case.trainer}
    config = TrainerConfig(num_steps=num_steps, **settings)
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    result = built.training.train(dataset, config, log_scalar=log_scalar, shuffle_seed=0)
    figures = dataclasses.asdict(result)
    del figures["evaluation"]
    return figures | {"data_wait_ms": data_wait_ms[-1]}
