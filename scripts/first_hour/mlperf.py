"""Steps of MLPerf's DLRM-DCNv2 on one rank: by precision, by pipeline, compiled, and profiled.

One model serves all cases, as its tables fill the GPU.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import profile
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipeline, TrainPipelineSparseDist

from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.ranks.stopwatch import Stopwatch
from dlrm_sharded.training.pipeline import make_pipeline
from dlrm_sharded.training.prefetch import Prefetcher
from first_hour.dcnv2 import Dcnv2, build, dcnv2_dataset, endless, train_batches
from first_hour.traces import read_events, summary
from studies.study import StudyRun

BATCH_SIZES, SMALL_BATCH_SIZES = (65_536, 8192), (64, 32)
"""MLPerf's global batch size on one rank, and the share of one of 8 ranks."""

NEEDED_GIB = 125
"""Free memory of a GPU for all of MLPerf's tables, 98 GiB with their optimizer's state."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of steps of a case."""

    warmup: int
    timed: int
    profiled: int


STEPS, SMALL_STEPS = Lengths(8, 40, 10), Lengths(1, 3, 2)
CASE_S, SMALL_CASE_S = (10, 45), (5, 5)
"""Times of a case, and of one with torch.compile."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train.

    Args:
        compile_mode: mode of torch.compile for the dense part; None leaves it.
    """

    batch_size: int
    precision: str
    pipeline: str = "sparse_dist"
    compile_mode: str | None = None
    is_profiled: bool = False

    @property
    def name(self) -> str:
        compiled = f", compiled {self.compile_mode}" if self.compile_mode else ""
        return f"{self.batch_size} {self.precision} {self.pipeline}{compiled}"


def cases_of(large: int, share: int, device: torch.device, *, small: bool) -> list[Case]:
    """Return the cases; those that time is most likely to be short for come last."""
    sizes = (large, share)
    in_bf16 = [
        Case(size, "bf16", pipeline, is_profiled=True)
        for size in sizes
        for pipeline in ("sparse_dist", "base")
    ]
    in_tf32 = [] if device.type == "cpu" else [Case(size, "tf32") for size in sizes]
    compiled = [
        Case(share, "bf16", compile_mode="default", is_profiled=True),
        Case(large, "bf16", compile_mode="default"),
    ]
    with_graphs = Case(share, "bf16", compile_mode="reduce-overhead", is_profiled=True)
    return [
        *in_bf16,
        *in_tf32,
        *([] if small else compiled),
        *(Case(size, "fp32") for size in reversed(sizes)),
        *([] if small else [with_graphs]),
    ]


def run(study: StudyRun) -> None:
    device = study.device()
    large, share = SMALL_BATCH_SIZES if study.small else BATCH_SIZES
    with process_group():
        cut = _cut_rows(device)
        study.record("overrides", cut)
        if study.small:
            study.record("compiled", "left out: compiling takes longer than a rehearsal")
        datasets = {size: dcnv2_dataset(size, *cut, small=study.small) for size in (large, share)}
        built = build(datasets[large], device, small=study.small)
        study.record("table_gib", built.table_gib)
        study.record("build_s", built.build_s)
        works = {
            case.name: functools.partial(
                _checked, study, built, case, datasets[case.batch_size], device
            )
            for case in cases_of(large, share, device, small=study.small)
        }
        case_s = SMALL_CASE_S if study.small else CASE_S
        for name, figures in study.each(
            works, seconds=lambda name: case_s["compiled" in name], goes_on=True
        ):
            if "bf16" in name:
                study.show(**{name: f"{figures['step_ms']:.1f} ms"})


def _cut_rows(device: torch.device) -> tuple[str, ...]:
    """Return overrides that cut the tables if the GPU is too small for all of them."""
    if device.type == "cpu" or torch.cuda.mem_get_info(device)[0] >= NEEDED_GIB * GIB:
        return ()
    return ("data.max_rows=10000000",)


def _checked(
    study: StudyRun, built: Dcnv2, case: Case, dataset: SyntheticDataset, device: torch.device
) -> dict[str, Any]:
    """Measure a case and check that the loss is a number."""
    figures = _measured(built, case, dataset, device, small=study.small)
    study.check(math.isfinite(figures["loss"]), f"{case.name}: the loss is {figures['loss']}")
    return figures


def _measured(
    built: Dcnv2, case: Case, dataset: SyntheticDataset, device: torch.device, *, small: bool
) -> dict[str, Any]:
    """Train some steps and return their times."""
    lengths = SMALL_STEPS if small else STEPS
    _prepare(built, case)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pipeline = make_pipeline(
        case.pipeline, built.training.sharded, built.training.optimizer, device
    )
    try:
        with Prefetcher(endless(train_batches(dataset)), depth=2, device=device) as batches:
            figures = _timed(pipeline, batches, device, lengths)
            figures["samples_per_s"] = case.batch_size / figures["step_ms"] * 1e3
            if case.is_profiled:
                trace = Path("traces") / f"{case.name.replace(', ', '_').replace(' ', '_')}.json.gz"
                _trace(pipeline, batches, trace, lengths.profiled)
                figures["trace"] = str(trace)
                figures["profiled"] = summary(read_events(trace), lengths.profiled)
    finally:
        if isinstance(pipeline, TrainPipelineSparseDist):
            pipeline.detach()
    return figures


def _timed(
    pipeline: TrainPipeline[Batch, Any], batches: Prefetcher, device: torch.device, lengths: Lengths
) -> dict[str, Any]:
    started = time.perf_counter()
    for _ in range(lengths.warmup):
        pipeline.progress(batches)
    warmup_s = time.perf_counter() - started
    batches.take_wait_ms()
    watch, host_ms = Stopwatch(device), []
    watch.mark()
    started = time.perf_counter()
    for _ in range(lengths.timed):
        step_started = time.perf_counter()
        loss, _, _ = pipeline.progress(batches)
        host_ms.append(1e3 * (time.perf_counter() - step_started))
        watch.mark()
    step_ms = watch.intervals_ms()
    wall_ms = 1e3 * (time.perf_counter() - started) / lengths.timed
    return {
        "step_ms": float(np.median(step_ms)),
        "step_ms_p90": float(np.percentile(step_ms, 90)),
        "wall_ms": wall_ms,
        "host_ms": float(np.median(host_ms)),
        "data_wait_ms": batches.take_wait_ms(),
        "loss": float(loss),
        "warmup_s": warmup_s,
        "peak_gib": (torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None),
    }


def _trace(
    pipeline: TrainPipeline[Batch, Any], batches: Prefetcher, path: Path, num_steps: int
) -> None:
    """Write the trace of some steps."""
    path.parent.mkdir(exist_ok=True)
    with profile() as profiler:  # of the CPU, and of the GPU if there is one
        for _ in range(num_steps):
            pipeline.progress(batches)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def _prepare(built: Dcnv2, case: Case) -> None:
    built.model.bf16 = case.precision == "bf16"
    torch.backends.cuda.matmul.allow_tf32 = case.precision == "tf32"
    model = built.model
    for layers in (model.dense_arch, model.inter_arch, model.over_arch):
        layers._compiled_call_impl = None  # of an earlier case
    if case.compile_mode:
        torch._dynamo.reset()
        for layers in (model.dense_arch, model.inter_arch, model.over_arch):
            layers.compile(mode=case.compile_mode)
