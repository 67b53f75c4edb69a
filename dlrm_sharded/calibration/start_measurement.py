"""Measures a first start on the ranks of a job, which all take part."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlrm_sharded.calibration.collect import CollectConfig, PlanMeasurer
from dlrm_sharded.calibration.first_start import (
    FIT_SHARE,
    MEASURE,
    Chooser,
    Measured,
    disturbance,
    measure_plans,
)
from dlrm_sharded.calibration.plan_sizes import PlanSizes, plan_sizes
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.samples import Sample, problem_of
from dlrm_sharded.calibration.schedule import Slot, group_sizes
from dlrm_sharded.calibration.start_plans import StartPlan, start_plans
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import MAX_LOAD_PER_CORE, release_memory
from dlrm_sharded.hardware.torch_defaults import torch_defaults
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, free_bytes, has_core_for_each
from dlrm_sharded.ranks.surroundings import Surroundings, SurroundingsWatch

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.1
"""Largest share of a rank's free memory for the tables of a measurement."""

MIN_PLANS = 3
"""Smallest number of measured plans that adapt the prices."""

TABLE_GIB = {"cpu": 0.5, "cuda": 4.0}
IDS_PER_STEP = {"cpu": 300_000, "cuda": 2_000_000}
"""Largest tables and ids of a rank in a measurement, by type of device: beyond the caches, and
small enough for dozens of measurements."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Samples, and the other work that ran during their measurement; None if there was little."""

    samples: tuple[Sample, ...]
    disturbance: str | None


def announcement(rank: Rank, budget_s: float) -> str:
    """Say beforehand what is measured, by which ranks, and how long it takes."""
    text = (
        f"this hardware has no prices of its own; they are measured for at most {budget_s:.0f} s, "
        "once (calibrate=never leaves that out): "
    )
    if rank.world_size == 1:
        return text + "this rank looks up made-up plans of the tables"
    computing = _computing(rank)
    lookups = f"{computing} ranks look" if computing > 1 else "rank 0 looks"
    return text + (
        f"{lookups} up made-up plans of the tables, all {rank.world_size} ranks exchange vectors "
        "and ids, and rank 0 chooses what to measure and fits the prices"
    )


@torch_defaults()
def measure_first_start(
    rank: Rank,
    context: RunContext,
    tables: Sequence[Table],
    batch_size: int,
    *,
    budget_s: float,
) -> Collected | None:
    """Measure the hardware of a job; a collective of all ranks.

    Rank 0 gets the result; it is None if the time was too short, as it is on other ranks.

    Args:
        context: of the ranks that measure.
        tables: those of the run, from which plans are made up.
        batch_size: global batch of the run.
        budget_s: time of all this.
    """
    started_s, watch = time.perf_counter(), SurroundingsWatch()
    assert context.optimizer is not None
    sizes = _sizes(rank)
    computing = _computing(rank)
    plans = start_plans(
        tables,
        min(batch_size, max(sizes.batch_sizes)),
        sizes.rank_limits(context.optimizer),
        computing=computing,
        exchanging=rank.world_size,
    )
    prior = learned_cost_model(context, warns=False) if rank.is_zero else None
    chooser = None if prior is None else _chooser(prior, plans, rank, budget_s)
    config = CollectConfig(optimizer=context.optimizer, measure=MEASURE)
    measurer = PlanMeasurer(config, sizes, rank, {computing, rank.world_size})

    measured = measure_plans(
        plans,
        chooser,
        functools.partial(_measure, measurer, config.seed),
        budget_s=budget_s,
        decide=on_rank_zero,
        started_s=started_s,
    )
    surroundings = watch.conclude()
    measurer.leave()
    del measurer  # with its memory for tables
    gc.collect()  # sharded modules are in reference cycles
    release_memory(rank.device)
    if prior is None:
        return None
    sound = tuple(sample for sample in measured.samples if problem_of(sample) is None)
    measured = dataclasses.replace(measured, samples=sound)
    if len(measured.samples) < MIN_PLANS:
        log.warning(
            "only %d plans could be measured in %.0f s, too few to adapt the prices; give "
            "calibrate=SECONDS more of them, or leave it out with calibrate=never",
            len(measured.samples),
            measured.seconds,
        )
        return None
    return _concluded(rank, measured, surroundings)


def _chooser(
    prior: LearnedCostModel, plans: Sequence[StartPlan], rank: Rank, budget_s: float
) -> Chooser:
    """Return what chooses plans within the time that the fit leaves."""
    within_s = (1.0 - FIT_SHARE) * budget_s
    return Chooser.of_plans(prior, plans, budget_s=within_s, ranks_per_host=rank.local_world_size)


def _measure(measurer: PlanMeasurer, seed: int, plan: StartPlan, attempt: int) -> Sample | None:
    """Measure a plan, with the same ids in every attempt."""
    slot = Slot(plan.kind, plan.number, attempt, plan.world_size)
    rng = np.random.default_rng([seed, plan.number])
    return measurer.measure_drawn(slot, plan.tables, plan.batch_size, rng)


def _concluded(rank: Rank, measured: Measured, surroundings: Surroundings) -> Collected:
    """Return the result of rank 0."""
    cores = os.cpu_count() or 1
    found = disturbance(
        measured,
        load=max(surroundings.hosts.values()),
        core_wait=surroundings.core_wait if has_core_for_each(rank) else 0.0,
        max_load=(MAX_LOAD_PER_CORE if torch.get_num_threads() == 1 else 1) * cores,
    )
    log.info("%d plans were measured in %.1f s", len(measured.samples), measured.seconds)
    return Collected(measured.samples, found)


def _computing(rank: Rank) -> int:
    """Return how many ranks compute at once: those of one host that have cores or GPUs."""
    return min(group_sizes(rank)[0], rank.local_world_size)


def _sizes(rank: Rank) -> PlanSizes:
    """Return the sizes of the plans, the same on all ranks."""
    kind = rank.device.type
    free: list[Any] = [None] * rank.world_size
    dist.all_gather_object(free, free_bytes(rank))
    table_gib = min(TABLE_GIB[kind], MEMORY_SHARE * min(free) / GIB)
    sizes = plan_sizes(rank, batch_sizes=None, table_gib=None, ids_per_step=IDS_PER_STEP[kind])
    pooled_gib = MEMORY_SHARE * min(free) / GIB
    return dataclasses.replace(
        sizes,
        table_gib=table_gib,
        pooled_gib=pooled_gib if sizes.pooled_gib is None else min(sizes.pooled_gib, pooled_gib),
    )
