"""Errors of the priors of GPUs: left-out GPUs, exchanges between hosts, MLPerf's steps."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.figures import rows_table
from dlrm_sharded.cost.exchange_curves import EvenVolumes
from dlrm_sharded.cost.learned import LearnedCostModel, prior_cost_model
from dlrm_sharded.datasets.presets import mlperf_dcnv2
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.collectives import HostCollectives, measured_curves
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, gpu_specs
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.neuroshard import NeuroShardSharder, neuroshard_sharder
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

LARGE_BYTES = 8 * 2**20
"""Messages from this size on have another target than smaller ones."""

MEMORY_BYTES = 56 * GIB
GPUS_OF_HOST = 8

DENSE_FLOP_PER_SAMPLE = 96e6
"""Forward and backward of MLPerf's DLRM-DCNv2 without its tables."""

DENSE_SHARE = 0.4
"""Part of the bf16 peak that dense layers are assumed to reach, so that 8 H100 come out right."""

BASIS = "predicted"

NUM_REPLICATED = 13
"""Tables that every GPU has in NVIDIA's plan."""


@dataclass(frozen=True, slots=True)
class MlperfStep:
    """A published step of MLPerf Training, DLRM-DCNv2, closed division."""

    gpu: str
    num_gpus: int
    batch_size: int
    measured_ms: float


MLPERF_STEPS = [
    MlperfStep(*step)
    for step in [
        ("a100_sxm_80gb", 8, 55_296, 8.65),
        ("a100_sxm_80gb", 64, 135_168, 5.92),
        ("h100_sxm", 8, 55_296, 4.02),
        ("h100_sxm", 64, 135_168, 2.75),
        ("h100_sxm", 128, 135_168, 1.99),
        ("h200_sxm", 8, 55_296, 3.66),
        ("h200_sxm", 16, 65_536, 4.02),
        ("h200_sxm", 32, 131_200, 4.25),
        ("b200_sxm", 8, 55_296, 2.42),
        ("b200_sxm", 16, 55_296, 2.48),
        ("gb200", 8, 55_296, 2.33),
        ("gb200", 64, 135_168, 1.45),
        ("h100_pcie", 8, 55_296, 12.2),
        ("l40s", 8, 55_296, 23.6),
    ]
]
"""From the result logs at github.com/mlcommons/training_results_v3.0 to v5.0."""

DEEPEP_GB_PER_S = {16: 43, 32: 58, 64: 51}
"""DeepEP's bandwidth of a GPU between hosts, H800 and 400 Gb/s: its docs/legacy.md."""

EXPERT_MIB = 56
EXPERT_EXCHANGES_MS = {16: (0.75, 1.78), 32: (1.79, 3.52), 64: (5.45, 4.46)}
"""DeepEP's dispatch and combine of 56 MiB a GPU on H100, from aiconfigurator, commit 095f58a."""

MLPERF_BATCH_SIZES = {8: 55_296, 16: 65_536, 64: 135_168}
"""Global batch sizes of MLPerf's submissions by number of GPUs."""

NUM_GPUS_OF_DOMAIN = {"gb200": 64}
"""GPUs that NVLink connects where that is not one host of 8."""


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield a case for each line of the report."""
    for part, (_, _, make) in PARTS.items():
        if options.only not in (None, part):
            continue
        for key, run in make(options.num):
            yield Case(f"{part}/{key}", functools.partial(_row, part, run))


def _row(part: str, run: Callable[[], Row]) -> list[Row]:
    quiet()
    return [{"part": part} | run()]


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write a table of each part."""
    texts = []
    for part, (text, columns, _) in PARTS.items():
        if found := [row for row in rows if row["part"] == part]:
            texts.append(f"{text}\n\n{rows_table(found, columns)}")
    return "\n\n".join(texts)


def left_out_errors(spec: GpuSpec, left_out: Sequence[str]) -> dict[str, list[float]]:
    """Return relative errors of a GPU's collectives of 2 to 8 GPUs, of large and of small messages.

    They are predicted without the measurements of some systems.
    """
    host = HostCollectives(spec, left_out=left_out)
    errors: dict[str, list[float]] = {"large": [], "small": []}
    for (system, collective, num_gpus), curve in measured_curves().items():
        if system != spec.collectives:
            continue
        for sent_bytes, ms in zip(curve.sent_bytes.tolist(), curve.ms.tolist(), strict=True):
            error = abs(host.time_ms(collective, num_gpus, sent_bytes) / ms - 1)
            is_large = sent_bytes * num_gpus / (num_gpus - 1) >= LARGE_BYTES - 1
            errors["large" if is_large else "small"].append(error)
    return errors


def measured_gpus() -> dict[str, GpuSpec]:
    """Return one GPU of each measured system."""
    return {spec.collectives: spec for spec in gpu_specs().values() if spec.collectives}


def _left_out(num: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    gpus = measured_gpus()
    for system, spec in gpus.items():
        alike = [other for other, them in gpus.items() if them.link_gb_per_s == spec.link_gb_per_s]
        yield system, functools.partial(_left_out_row, spec, [system], alike)


def _left_out_row(spec: GpuSpec, itself: Sequence[str], alike: Sequence[str]) -> Row:
    row: Row = {"gpu": itself[0]}
    for name, left_out in {"itself": itself, "alike": alike}.items():
        for size, errors in left_out_errors(spec, left_out).items():
            worst, mean = 100 * max(errors), 100 * float(np.mean(errors))
            row[f"{size}_{name}"] = f"{mean:.0f} (at most {worst:.0f})"
    return row


def _hosts(num: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Compare all-to-alls between hosts of 8 GPUs with exchanges of experts' inputs and outputs."""
    for num_gpus in EXPERT_EXCHANGES_MS:
        yield str(num_gpus), functools.partial(_host_row, num_gpus)


def _host_row(num_gpus: int) -> Row:
    curves = _prior(gpu_specs()["h100_sxm"]).exchange_curves
    assert curves is not None
    volume = EXPERT_MIB * 2**20 / num_gpus
    even = EvenVolumes(num_gpus, GPUS_OF_HOST, volume=volume, id_volume=volume)
    ms = float(curves.all_to_all_ms(volume, even)[0])
    dispatch_ms, combine_ms = EXPERT_EXCHANGES_MS[num_gpus]
    return {
        "num_gpus": num_gpus,
        "public_gb_per_s": DEEPEP_GB_PER_S[num_gpus],
        "gb_per_s": volume * (num_gpus - GPUS_OF_HOST) / ms / 1e6,
        "dispatch_ms": dispatch_ms,
        "combine_ms": combine_ms,
        "ms": ms,
    }


def _steps(num: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    for step in MLPERF_STEPS[:num]:
        key = f"{step.num_gpus} {step.gpu} {step.batch_size}"
        yield key, functools.partial(predicted_step, step)


def predicted_step(step: MlperfStep) -> Row:
    """Predict a step of HugeCTR: fp16 exchanges, the smallest tables on every GPU, no overlap."""
    spec = gpu_specs()[step.gpu]
    task = mlperf_task(step.num_gpus, step.batch_size, spec)
    # HugeCTR exchanges vectors of half the size: as if links had twice the bandwidth
    halves = dataclasses.replace(
        task.topology,
        intra_host_bytes_per_s=2e9 * spec.link_gb_per_s,
        inter_host_bytes_per_s=2e9 * spec.adapter_gb_per_s,
    )
    halved = dataclasses.replace(task, topology=halves)
    model = _prior(spec)
    plan = _neuroshard(model, replicate=_smallest(halved)).shard(halved)
    per_rank = model.predict(plan, halved).per_rank
    slowest = max(per_rank, key=lambda stages: stages.total_ms)
    assert spec.bf16_tflops is not None
    flop = DENSE_FLOP_PER_SAMPLE * step.batch_size / step.num_gpus
    dense_ms = flop / (DENSE_SHARE * spec.bf16_tflops * 1e9)
    predicted_ms = dense_ms + slowest.total_ms
    return dataclasses.asdict(step) | {
        "predicted_ms": predicted_ms,
        "error": predicted_ms / step.measured_ms - 1,
        "dense_ms": dense_ms,
        "lookups_ms": slowest.computation_ms,
        "exchanges_ms": slowest.exchange_ms,
    }


def mlperf_task(num_gpus: int, batch_size: int, spec: GpuSpec) -> ShardingTask:
    """Return MLPerf's tables on hosts of 8 GPUs."""
    topology = Topology(
        num_gpus,
        MEMORY_BYTES,
        local_world_size=min(num_gpus, NUM_GPUS_OF_DOMAIN.get(spec.key, GPUS_OF_HOST)),
        optimizer_bytes_per_row=4,
    )
    return ShardingTask(mlperf_dcnv2(), topology, batch_size)


def _prior(spec: GpuSpec) -> LearnedCostModel:
    return prior_cost_model(RunContext("cuda", Hardware(spec.device_name)))


def _neuroshard(model: LearnedCostModel, **arguments: Any) -> NeuroShardSharder:
    return neuroshard_sharder(SharderContext(RunContext("cuda"), model), **arguments)


def _smallest(task: ShardingTask) -> list[str]:
    """Return the tables that NVIDIA's plan replicates, which are the smallest ones."""
    by_size = sorted(task.tables, key=lambda table: table.num_embeddings * table.embedding_dim)
    return [table.name for table in by_size[:NUM_REPLICATED]]


PARTS: dict[str, tuple[str, Mapping[str, str], Callable[[int | None], Iterator[Any]]]] = {
    "left_out": (
        "Mean error in % of all-to-all, reduce-scatter and all-gather of 2 to 8 GPUs, predicted "
        "without the GPU, and without all GPUs whose links have its bandwidth:",
        {
            "GPU": "{gpu}",
            "from 8 MiB up": "{large_itself}",
            "below": "{small_itself}",
            "from 8 MiB up, none alike": "{large_alike}",
            "below, none alike": "{small_alike}",
        },
        _left_out,
    ),
    "hosts": (
        f"Between hosts: GB/s of a GPU, and ms for {EXPERT_MIB} MiB a GPU:",
        {
            "GPUs": "{num_gpus}",
            "DeepEP, GB/s": "{public_gb_per_s}",
            "prior, GB/s": "{gb_per_s:.0f}",
            "dispatch, ms": "{dispatch_ms}",
            "combine, ms": "{combine_ms}",
            "prior, ms": "{ms:.2f}",
        },
        _hosts,
    ),
    "steps": (
        "Steps of MLPerf Training's DLRM-DCNv2 with HugeCTR, from the result logs: dense layers at "
        f"{100 * DENSE_SHARE:.0f} % of the bf16 peak, chosen for 8 H100, nothing overlaps, fp16 "
        f"exchanges, the {NUM_REPLICATED} smallest tables on every GPU:",
        {
            "GPUs": "{num_gpus} {gpu}",
            "batch": "{batch_size:,}",
            "published, ms": "{measured_ms:.2f}",
            "predicted": "{predicted_ms:.2f}",
            "error": "{error:+.0%}",
            "dense": "{dense_ms:.2f}",
            "lookups": "{lookups_ms:.2f}",
            "exchanges": "{exchanges_ms:.2f}",
        },
        _steps,
    ),
}
"""Text, columns and cases of each part."""

OPTIONS = {
    "only": option(str, "make and print one part", choices=list(PARTS)),
    "num": option(int, "number of published steps; by default, all"),
}
