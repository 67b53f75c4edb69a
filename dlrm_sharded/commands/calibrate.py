"""Measure this machine and fit a cost model to the measurements: the command `dlrm-calibrate`.

dlrm-calibrate minutes=10
dlrm-calibrate costs=calibration/costs.parquet

Ranks measure random plans, and append each to the store of this hardware, which later runs use to
plan. So a kill loses nothing, and each further call adds plans. Under torchrun or TorchX, all ranks
of the job measure, so that exchanges between hosts are measured, too; otherwise the command starts
its own ranks. Rank 0 fits a model to all samples in the store.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from dlrm_sharded.calibration.collect import collect
from dlrm_sharded.calibration.costs_file import read_costs
from dlrm_sharded.calibration.disturbance import Disturbance, is_disturbed
from dlrm_sharded.calibration.fit_collected import MIN_FITTED, fit_learned, fit_neuroshard
from dlrm_sharded.calibration.plan_limits import CALIBRATION
from dlrm_sharded.calibration.prediction_errors import errors_table
from dlrm_sharded.calibration.sample_store import (
    conditions_of,
    drawn_conditions,
    next_number,
    sample_store,
)
from dlrm_sharded.calibration.samples import RUN, Sample
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import all_but, run_command
from dlrm_sharded.files.errors import ConfigError, check_choice, check_count, check_number
from dlrm_sharded.files.json_files import check_path, folder_to_write
from dlrm_sharded.hardware.artifact_kinds import RETUNE
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import context_of_job
from dlrm_sharded.model.fused_optimizers import EMBEDDING_OPTIMIZERS
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.ranks.gpus import visible_gpus
from dlrm_sharded.ranks.process import threads_of_a_rank
from dlrm_sharded.ranks.torchrun import launch

log = logging.getLogger("dlrm_sharded.calibrate")  # also if the module runs as __main__

MODULE = "dlrm_sharded.commands.calibrate"
CPU_RANKS = 4
"""Number of ranks on a machine without GPUs."""

RUN_RANKS = 2
"""Default number of ranks of a run on a CPU; ranks here have the same number of threads."""

LEARNED = "learned"


def calibrate(cfg: DictConfig) -> None:
    """Measure this machine, unless costs are given, and fit a cost model."""
    with exit_codes(all_ranks_alike=True):
        _check(cfg)
    if cfg.costs is not None:
        _fit(cfg, *read_costs(Path(cfg.costs)))
        return
    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_a_rank(RUN_RANKS)))
        num_ranks = str(cfg.num_ranks or default_num_ranks())
        sys.exit(launch(["--nproc-per-node", num_ranks, "-m", MODULE, *sys.argv[1:]]))
    with process_group(timeout_s=1800) as rank:
        context = context_of_job(rank, cfg.optimizer.embedding)
        with all_or_none():
            store = sample_store(context, cfg.journal)
            if store is None:
                raise ConfigError(
                    "journal is none, so samples have no place; set it to auto or a folder"
                )
        conditions = drawn_conditions(context)
        first = on_rank_zero(lambda: next_number(store.read(conditions).values()))

        def note(sample: Sample, disturbance: Disturbance) -> None:
            if not store.append(conditions, sample, disturbance):
                raise ConfigError(f"{store.path} cannot be written; give another journal")

        collect(
            rank,
            note,
            optimizer=cfg.optimizer.embedding,
            sizes=CALIBRATION,
            budget_s=60 * cfg.minutes,
            batch_sizes=cfg.batch_sizes,
            first=first,
            seed=cfg.seed,
        )
    if rank.is_zero:
        samples = list(store.read(conditions_of(context)).values())
        new = [sample for sample in samples if sample.kind != RUN and sample.number >= first]
        log.info("measured %d plans; the samples are in %s", len(new), store.path)
        if num_disturbed := sum(is_disturbed(sample.noise) for sample in new):
            log.warning(
                "other processes had the core of a rank during %d of them, so these count less: "
                "calibrate again when the machine is idle",
                num_disturbed,
            )
        _fit(cfg, samples, context)


def unused(cfg: DictConfig) -> dict[str, str]:
    """Declare which keys have no effect on a calibration, and why."""
    reasons = all_but(cfg, "optimizer", "embedding")
    if cfg.costs is not None:
        of_measuring = ("minutes", "num_ranks", "optimizer", "batch_sizes", "journal")
        reasons |= dict.fromkeys(of_measuring, "costs are given, and nothing is measured")
    if cfg.architecture == LEARNED:
        reasons["num_steps"] = "architecture=neuroshard alone takes steps"
    return reasons


def main() -> None:
    run_command(calibrate, "calibrate", unused=unused)


def default_num_ranks() -> int:
    """Return one rank for every visible GPU, or `CPU_RANKS` if there are none."""
    return max(len(visible_gpus()), 1) if device_type() == "cuda" else CPU_RANKS


def _check(cfg: DictConfig) -> None:
    """Raise ConfigError if a value cannot be used."""
    folder_to_write("out", cfg.out)
    check_choice("architecture", cfg.architecture, MIN_FITTED)
    check_count("seed", cfg.seed, least=0)
    check_count("num_steps", cfg.num_steps, least=1)
    if cfg.costs is not None:
        check_path("costs", cfg.costs)
        return
    check_number("minutes", cfg.minutes, above=True)
    if cfg.num_ranks is not None:
        check_count("num_ranks", cfg.num_ranks, least=1)
    for batch_size in cfg.batch_sizes or ():
        check_count("a size in batch_sizes", batch_size, least=1)
    check_choice("optimizer.embedding", cfg.optimizer.embedding, EMBEDDING_OPTIMIZERS)


def _fit(cfg: DictConfig, samples: Sequence[Sample], context: RunContext) -> None:
    """Fit the model, and report its errors on plans that were left out of the fit."""
    out = Path(cfg.out)
    if cfg.architecture == LEARNED:
        path, errors = fit_learned(samples, context, out)
    else:
        path, errors = fit_neuroshard(samples, context, out, seed=cfg.seed, num_steps=cfg.num_steps)
    log.info("errors on plans that were left out of the fit:\n\n%s\n", errors_table(errors))
    log.info("fitted %d samples; wrote %s", len(samples), path)
    if cfg.architecture == LEARNED:
        log.info(
            "to tune a packaged policy to this model, in about a minute: dlrm-train-policy "
            "policy=dreamshard %s optimizer.embedding=%s cost_model.artifact='%s' out='%s'",
            RETUNE,
            context.optimizer,
            path,
            path.parent,
        )


if __name__ == "__main__":
    main()
