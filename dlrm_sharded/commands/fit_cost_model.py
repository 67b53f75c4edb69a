"""Fit a cost model to collected costs: the command `dlrm-fit-cost-model`.

dlrm-fit-cost-model costs=calibration/costs.parquet out=calibration

It also reports how well the model predicts plans that it was not fitted to.
"""

from __future__ import annotations

import logging
import time

import hydra
import torch
from omegaconf import DictConfig

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import instantiate, run_hydra
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.cost.learned import LearnedCostModel, shipped_prior
from dlrm_sharded.files.json_files import folder_to_write
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.fitting.calibrate import FitConfig, fit_cost_model
from dlrm_sharded.fitting.costs_file import read_costs
from dlrm_sharded.fitting.evaluate import errors_table, repeatability_text
from dlrm_sharded.fitting.samples import CollectedCosts
from dlrm_sharded.hardware.artifact import name_in_folder, write_artifact
from dlrm_sharded.hardware.artifact_kinds import CALIBRATE, cost_model_kind
from dlrm_sharded.hardware.compare import compare
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import read_fingerprint
from dlrm_sharded.hardware.hardware import Hardware

log = logging.getLogger("dlrm_sharded.fit")


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="fit")
def hydra_main(cfg: DictConfig) -> None:
    with exit_codes():
        started = time.perf_counter()
        out = folder_to_write("out", cfg.out)
        costs = read_costs(cfg.costs)
        _warn_of_other_hardware(costs.hardware, costs.manifest["device"])
        config: FitConfig = instantiate(cfg.fit)
        fitted = fit_cost_model(costs, config, _prior(costs) if config.from_prior else None)
        kind = cost_model_kind(fitted.meta["kind"])
        name = name_in_folder(out, kind, Hardware.from_meta(fitted.meta))
        path = write_artifact(out, name, fitted.arrays, fitted.meta)
        log.info("held-out plans:\n\n%s\n", errors_table(fitted.meta["held_out_errors"]))
        if (text := repeatability_text(costs.manifest["repeatability"])) is not None:
            log.info("%s", text)
        log.info("fitted in %.0f s; wrote %s", time.perf_counter() - started, path)


def main() -> None:
    run_hydra(hydra_main)


def _prior(costs: CollectedCosts) -> LearnedCostModel | None:
    """Return the packaged model for the hardware of the costs; None if it is of another device."""
    manifest = costs.manifest
    prior = shipped_prior(RunContext(manifest["device"], costs.hardware, manifest["optimizer"]))
    return prior if prior.device == manifest["device"] else None


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
            "model will predict that hardware; to calibrate this machine, run %s",
            measured.name,
            "no GPU" if here is None else here.name,
            CALIBRATE,
        )


if __name__ == "__main__":
    main()
