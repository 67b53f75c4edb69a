"""Measures random plans on one rank with `dlrm-collect-costs`, which `fit` fits a model to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dlrm_sharded.files.provenance import commit, device_name, versions
from dlrm_sharded.fitting.costs_file import manifest_path, read_costs
from dlrm_sharded.fitting.samples import CollectedCosts
from studies.processes import module_command
from studies.study import StudyRun

COSTS = Path("costs.parquet")
COLLECT = "dlrm_sharded.commands.collect_costs"
SIZES = (
    "collect.batch_sizes=[8192,16384,32768,65536]",
    *("collect.ids_per_step=8000000", "collect.table_gib=24"),
)
SMALL_SIZES = (
    *("collect.batch_sizes=[256,512]", "collect.ids_per_step=8000", "collect.table_gib=0.02"),
    *("collect.num_samples=128", "collect.repeat_every=16"),
    *("collect.measure.iterations=3", "collect.measure.warmup=1", "collect.measure.num_batches=1"),
)

AROUND_S, SMALL_AROUND_S = 50, 15
"""Time that a collection takes before its first plan and after its last, without which the step
would be killed. A killed one keeps its plans, though, and `fit` uses them."""


def run(study: StudyRun) -> None:
    device = study.device()
    if COSTS.exists() and not _is_of_now(device):
        print(f"{COSTS} is of another commit, other versions or other hardware: collected again")
        for path in (manifest_path(COSTS), COSTS):
            path.unlink(missing_ok=True)
    if not COSTS.exists():
        around_s = SMALL_AROUND_S if study.small else AROUND_S
        finish_collection(study, time_budget_s=max(study.seconds_left - around_s, 1.0))
    if COSTS.exists():
        figures = _figures(read_costs(COSTS))
        study.record("collection", figures)
        study.show(
            plans=str(figures["plans"]),
            plans_per_s=f"{figures['plans_per_s']:.2f}",
            size=f"{figures['size_mib']:.1f} MiB",
        )


def finish_collection(study: StudyRun, *, time_budget_s: float) -> None:
    """Start a collection, or continue it, for some time."""
    sizes = SMALL_SIZES if study.small else SIZES
    settings = (f"out={COSTS}", "num_ranks=1", f"collect.time_budget_s={time_budget_s}")
    study.checked_command(module_command(COLLECT, *settings, *sizes), noun="the collection")


def _is_of_now(device: torch.device) -> bool:
    """Return whether the collection was made by this commit on this hardware."""
    manifest = read_costs(COSTS).manifest
    now = {"commit": commit(), "versions": versions(), "hardware": device_name(device)}
    return all(manifest[key] == value for key, value in now.items())


def _figures(costs: CollectedCosts) -> dict[str, Any]:
    manifest = costs.manifest
    keys = ("collect_s", "repeatability", "hardware", "batch_sizes", "table_gib")
    return {key: manifest[key] for key in keys} | {
        "plans": len({sample.number for sample in costs.samples}),
        "measurements": len(costs.samples),
        # the plans of earlier starts count too
        "plans_per_s": round(len(costs.samples) / max(manifest["collect_s"], 0.1), 3),
        "size_mib": round(COSTS.stat().st_size / 2**20, 2),
    }
