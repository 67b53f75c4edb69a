"""Measure this machine and fit a cost model to the measurements: the command `dlrm-calibrate`.

dlrm-calibrate minutes=10
dlrm-calibrate policies=true
dlrm-calibrate costs=calibration/costs.parquet

Ranks measure random plans. A collection that was killed continues when the command is started
again. Under torchrun or TorchX all ranks of the job measure, so that exchanges between hosts are
among what is measured, and rank 0 fits the model; otherwise the command starts ranks of its own.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from dlrm_sharded.calibration.collect import CollectConfig, collect
from dlrm_sharded.calibration.costs_file import manifest_path, read_costs
from dlrm_sharded.calibration.fit_collected import LEARNED, FitConfig, fit_collected
from dlrm_sharded.calibration.prediction_errors import errors_table
from dlrm_sharded.calibration.samples import CollectedCosts
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import instantiate, refuse_unused, run_hydra
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.files.json_files import check_path, folder_to_write
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.hardware.artifact import CALIBRATED
from dlrm_sharded.hardware.artifact_kinds import CALIBRATE, RETUNE
from dlrm_sharded.hardware.compare import compare
from dlrm_sharded.hardware.detect import read_fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.ranks.agreement import all_or_none
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.ranks.gpus import visible_gpus
from dlrm_sharded.ranks.process import LAUNCHER_VARIABLE, threads_of_a_rank
from dlrm_sharded.ranks.torchrun import launch

log = logging.getLogger("dlrm_sharded.calibrate")  # also of the module that runs as __main__

MODULE = "dlrm_sharded.commands.calibrate"
CPU_RANKS = 4
"""Ranks on a machine without GPUs."""

RUN_RANKS = 2
"""Ranks of a run on a CPU, unless told otherwise; a rank here has as many threads as one there."""

REST_S = 30.0
"""Time for the start of the ranks and for the fit, which is not the collection's."""

SHORT_MINUTES = 5.0
"""Below this, each plan is measured for less time, so that there are more plans."""

SHORT_REPEAT_EVERY = 10
"""More plans are measured twice, as a few say nothing about how well measurements repeat."""

SHORT_MEASURE = MeasureConfig(iterations=8, warmup=1, num_batches=2, time_budget_s=0.1)
POLICIES = ("autoshard", "dreamshard")
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables by which torchrun makes a process a rank of a job."""

MEASURES_NOTHING = "costs are given, and nothing is measured"


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="calibrate")
def hydra_main(cfg: DictConfig) -> None:
    is_rank = "RANK" in os.environ
    with exit_codes():
        # what is wrong is reported once, before ranks start
        costs = _check(cfg, is_first=not is_rank)
        code = 0
        if cfg.costs is None and not is_rank and cfg.fit is not None:
            code = _run(MODULE, [*sys.argv[1:], "fit=null"])
    if cfg.costs is None and not is_rank and cfg.fit is None:
        code = _start_ranks(cfg.num_ranks or default_num_ranks())
    if code:
        sys.exit(code)
    if cfg.costs is None and is_rank:
        _measure(cfg, costs)
    if cfg.fit is None or os.environ.get("RANK", "0") != "0":
        return
    with exit_codes():
        collected = read_costs(costs)
        path = _fit(collected, instantiate(cfg.fit), Path(cfg.out))
        if cfg.fit.model == LEARNED:
            code = _retune_policies(path, collected.manifest["optimizer"], retunes=cfg.policies)
    sys.exit(code)


def main() -> None:
    run_hydra(hydra_main)


def default_num_ranks() -> int:
    """Return one rank for every visible GPU, or `CPU_RANKS` if there are none."""
    return max(len(visible_gpus()), 1) if device_type() == "cuda" else CPU_RANKS


def _check(cfg: DictConfig, *, is_first: bool) -> Path:
    """Check the config and return the file of the measurements.

    Raises:
        ConfigError: a key has no effect, or a value cannot be used.
    """
    folder = folder_to_write("out", cfg.out)
    if not isinstance(cfg.policies, bool):
        raise ConfigError(f"policies is {cfg.policies!r}, must be true or false")
    if cfg.fit is not None:
        config: FitConfig = instantiate(cfg.fit)
        if cfg.policies and config.model != LEARNED:
            raise ConfigError(
                f"policies are re-tuned to a model of fit.model={LEARNED}, and fit.model is "
                f"{config.model}; leave policies out"
            )
    if cfg.costs is not None:
        check_path("costs", cfg.costs)
        refuse_unused(dict.fromkeys(("minutes", "num_ranks", "collect"), MEASURES_NOTHING))
        if cfg.fit is None:
            raise ConfigError(f"fit is null, and {MEASURES_NOTHING}; leave one of the two out")
        return Path(cfg.costs)
    if is_first:
        _collection(cfg)
        if cfg.num_ranks is not None:
            check_count("num_ranks", cfg.num_ranks, least=1)
    return folder / "costs.parquet"


def _collection(cfg: DictConfig) -> CollectConfig:
    """Return the settings of the collection; raise ConfigError if a value cannot be used."""
    check_number("minutes", cfg.minutes, above=True)
    config: CollectConfig = instantiate(cfg.collect)
    config = dataclasses.replace(config, time_budget_s=max(60 * cfg.minutes - REST_S, REST_S))
    if cfg.minutes < SHORT_MINUTES:
        config = dataclasses.replace(config, measure=SHORT_MEASURE, repeat_every=SHORT_REPEAT_EVERY)
    return config


def _start_ranks(num_ranks: int) -> int:
    """Run this module on ranks that torchrun starts from this process; return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_a_rank(RUN_RANKS)))
    return launch(["--nproc-per-node", str(num_ranks), "-m", MODULE, *sys.argv[1:]])


def _measure(cfg: DictConfig, out: Path) -> None:
    """Measure plans on this rank and the others of its job, in place of a complete collection."""
    with exit_codes(), process_group(timeout_s=1800) as rank:
        with all_or_none():
            config = _collection(cfg)
            if rank.is_zero:
                for path in (out, manifest_path(out)):
                    path.unlink(missing_ok=True)
        collect(config, out, rank)


def _fit(costs: CollectedCosts, config: FitConfig, out: Path) -> Path:
    """Fit a model, report how well it predicts unseen plans, and return the file of its artefact.

    Args:
        out: folder of the artefact.
    """
    started = time.perf_counter()
    _warn_of_other_hardware(costs.hardware, costs.manifest["device"])
    path, errors = fit_collected(costs, config, out)
    log.info("plans that were left out of the fit:\n\n%s\n", errors_table(errors))
    log.info("fitted in %.0f s; wrote %s", time.perf_counter() - started, path)
    return path


def _warn_of_other_hardware(measured: Hardware, device: str) -> None:
    """Warn if costs of a type of device were not measured on this machine, by its fingerprint."""
    here = None
    if device == "cpu" or torch.cuda.is_available():
        threads = None if measured.fingerprint is None else measured.fingerprint.cpu.threads
        fingerprint = read_fingerprint(torch.device(device), threads=threads)
        here = Hardware(device_name(torch.device(device)), fingerprint)
    is_same = here is not None and (
        here.name == measured.name
        if measured.fingerprint is None
        else compare(here, measured).has_same_fingerprint
    )
    if not is_same:
        log.warning(
            "the costs were measured on other hardware (%s) than this machine's (%s), and the "
            "model will predict that hardware; to calibrate this machine, run %s without costs",
            measured.name,
            "no GPU" if here is None else here.name,
            CALIBRATE,
        )


def _retune_policies(path: Path, optimizer: str, *, retunes: bool) -> int:
    """Adapt the packaged policies to the fitted model, or else say which command does so.

    Args:
        path: artefact of the model.
        optimizer: fused optimizer that it predicts.
    """
    overrides = [*RETUNE.split(), f"optimizer={optimizer}"]
    if path.parent != CALIBRATED:  # quotes for Hydra, as paths may have any characters
        overrides += [f"cost_model.artifact={json.dumps(str(path))}"]
        overrides += [f"out={json.dumps(str(path.parent))}"]
    if not retunes:
        print(
            "to re-tune a packaged policy to this model, in about a minute: dlrm-train-policy "
            f"policy=dreamshard {' '.join(overrides)}; with policies=true, a calibration does so "
            f"for {' and '.join(POLICIES)}"
        )
        return 0
    module = "dlrm_sharded.commands.train_policy"
    codes = (_run(module, [f"policy={policy}", *overrides]) for policy in POLICIES)
    return next((code for code in codes if code), 0)


def _run(module: str, overrides: list[str]) -> int:
    """Run a module in a process of its own, which is no rank of this job; return its exit code."""
    environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    environment[LAUNCHER_VARIABLE] = str(os.getpid())  # it dies with this process
    arguments = [sys.executable, "-m", module, *overrides]
    return subprocess.run(arguments, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
