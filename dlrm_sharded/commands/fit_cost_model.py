"""Fit a cost model to collected costs: the command `dlrm-fit-cost-model`.

dlrm-fit-cost-model costs=calibration/costs.parquet out=calibration

It also reports how well the model predicts plans that it was not fitted to.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from dlrm_sharded.artifact import CALIBRATE, artifact_name, write_artifact
from dlrm_sharded.calibration.calibrate import fit_cost_model
from dlrm_sharded.calibration.costs_file import read_costs
from dlrm_sharded.calibration.evaluate import errors_table
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import CONF_DIR, run_hydra
from dlrm_sharded.provenance import device_name

log = logging.getLogger("dlrm_sharded.fit")


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="fit")
def hydra_main(cfg: DictConfig) -> None:
    with exit_codes():
        started = time.perf_counter()
        costs = read_costs(cfg.costs)
        _warn_of_other_hardware(costs.manifest)
        fitted = fit_cost_model(costs, instantiate(cfg.fit))
        name = artifact_name(fitted.meta["kind"], fitted.meta["hardware"])
        path = write_artifact(Path(cfg.out), name, fitted.arrays, fitted.meta)
        log.info("held-out plans:\n\n%s\n", errors_table(fitted.meta["held_out_errors"]))
        log.info("fitted in %.0f s; wrote %s", time.perf_counter() - started, path)


def main() -> None:
    run_hydra(hydra_main)


def _warn_of_other_hardware(manifest: dict[str, Any]) -> None:
    here = None
    if manifest["device"] == "cpu" or torch.cuda.is_available():
        here = device_name(torch.device(manifest["device"]))
    if here != manifest["hardware"]:
        log.warning(
            "the costs were measured on other hardware (%s) than this machine's (%s), and the "
            "model will predict that hardware; to calibrate this machine, run %s",
            manifest["hardware"],
            here or "no GPU",
            CALIBRATE,
        )


if __name__ == "__main__":
    main()
