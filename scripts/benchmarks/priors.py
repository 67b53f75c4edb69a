"""Errors of the priors of GPUs: lookups, exchanges, whole steps, and plans by the step."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.figures import rows_table
from benchmarks.lookup_fit import left_out
from benchmarks.mlperf_steps import GPUS_OF_HOST, prior_model, steps
from benchmarks.public_lookups import FITTED_LOOKUPS, HELD_OUT, PublicLookup
from benchmarks.step_plans import step_plans
from dlrm_sharded.cost.exchange_curves import EvenVolumes
from dlrm_sharded.hardware.gpus.collectives import HostCollectives, measured_curves
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, gpu_specs
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

LARGE_BYTES = 8 * 2**20
"""Messages from this size on have another target than smaller ones."""

BASIS = "predicted"

DEEPEP_GB_PER_S = {16: 43, 32: 58, 64: 51}
"""DeepEP's bandwidth of a GPU between hosts, H800 and 400 Gb/s: its docs/legacy.md."""

EXPERT_MIB = 56
EXPERT_EXCHANGES_MS = {16: (0.75, 1.78), 32: (1.79, 3.52), 64: (5.45, 4.46)}
"""DeepEP's dispatch and combine of 56 MiB a GPU on H100, from aiconfigurator, commit 095f58a."""


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


def _lookups(num: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    for lookup in (*FITTED_LOOKUPS, *HELD_OUT):
        yield f"{lookup.source}: {lookup.name}", functools.partial(_lookup_row, lookup)


def _lookup_row(lookup: PublicLookup) -> Row:
    row: Row = {
        "source": lookup.source,
        "gpu": f"{lookup.gpu.key}, {lookup.gpu.memory_gb_per_s:,.0f} GB/s",
        "lookup": lookup.name,
        "measured_ms": lookup.measured_ms,
        "ms": lookup.predicted_ms(),
        "error": f"{lookup.error():+.0%}",
        "without_source": "held out",
        "without_gpu": "held out",
    }
    if lookup in FITTED_LOOKUPS:
        alike = {other.source for other in FITTED_LOOKUPS if other.gpu.key == lookup.gpu.key}
        row["without_source"] = f"{lookup.error(left_out(lookup.source)):+.0%}"
        row["without_gpu"] = f"{lookup.error(left_out(*alike)):+.0%}"
    return row


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
    for name, systems in {"itself": itself, "alike": alike}.items():
        for size, errors in left_out_errors(spec, systems).items():
            worst, mean = 100 * max(errors), 100 * float(np.mean(errors))
            row[f"{size}_{name}"] = f"{mean:.0f} (at most {worst:.0f})"
    return row


def _hosts(num: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Compare all-to-alls between hosts of 8 GPUs with exchanges of experts' inputs and outputs."""
    for num_gpus in EXPERT_EXCHANGES_MS:
        yield str(num_gpus), functools.partial(_host_row, num_gpus)


def _host_row(num_gpus: int) -> Row:
    curves = prior_model(gpu_specs()["h100_sxm"]).exchange_curves
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


PARTS: dict[str, tuple[str, Mapping[str, str], Callable[[int | None], Iterator[Any]]]] = {
    "lookups": (
        "Public times of lookups, in ms, and errors of the prior, of a fit without the source, and "
        "of one without all sources of its kind of GPU:",
        {
            "source": "{source}",
            "GPU": "{gpu}",
            "lookup": "{lookup}",
            "public": "{measured_ms:.4g}",
            "prior": "{ms:.3g}",
            "error": "{error}",
            "without the source": "{without_source}",
            "without the GPU": "{without_gpu}",
        },
        _lookups,
    ),
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
        "Steps of MLPerf Training's DLRM-DCNv2 with HugeCTR, from the result logs; nothing is "
        "fitted to them. The dense part is what does not overlap:",
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
        steps,
    ),
    "objectives": (
        "Predicted steps in ms of plans that neuroshard makes by the cost and by the step, with "
        "the computation and the exchanges of the slowest rank:",
        {
            "set": "{set}",
            "tables": "{tables}",
            "ranks": "{ranks}",
            "pipeline": "{pipeline}",
            "step by cost": "{cost_step_ms:.3f}",
            "by step": "{step_step_ms:.3f}",
            "gain": "{gain}",
            "computation": "{cost_compute_ms:.2f} to {step_compute_ms:.2f}",
            "exchanges": "{cost_exchange_ms:.2f} to {step_exchange_ms:.2f}",
        },
        step_plans,
    ),
}
"""Text, columns and cases of each part."""

OPTIONS = {
    "only": option(str, "make and print one part", choices=list(PARTS)),
    "num": option(int, "number of published steps, or of tasks of a set; by default, all"),
}
