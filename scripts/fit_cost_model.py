"""Fits a cost model to collected costs and says how well it predicts what it has not seen.

python scripts/fit_cost_model.py costs=calibration/costs.parquet out=calibration
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
from dlrm_sharded.calibration.evaluate import errors_table
from dlrm_sharded.calibration.samples import read_costs
from dlrm_sharded.commands.cli import exit_codes, run_hydra
from dlrm_sharded.provenance import device_name

log = logging.getLogger("dlrm_sharded.fit")
CONF_DIR = str(Path(__file__).resolve().parents[1] / "conf")


@hydra.main(version_base="1.3", config_path=CONF_DIR, config_name="fit")
def main(cfg: DictConfig) -> None:
    with exit_codes():
        started = time.perf_counter()
        costs = read_costs(cfg.costs)
        _say_whose(costs.manifest)
        fitted = fit_cost_model(costs, instantiate(cfg.fit))
        name = artifact_name(fitted.meta["kind"], fitted.meta["hardware"])
        path = write_artifact(Path(cfg.out), name, fitted.arrays, fitted.meta)
        log.info("held-out plans:\n\n%s\n", errors_table(fitted.meta["held_out_errors"]))
        log.info("fitted in %.0f s; wrote %s", time.perf_counter() - started, path)


def _say_whose(manifest: dict[str, Any]) -> None:
    here = None
    if manifest["device"] == "cpu" or torch.cuda.is_available():
        here = device_name(torch.device(manifest["device"]))
    if here != manifest["hardware"]:
        log.warning(
            "the costs are of other hardware (%s) than this machine's (%s): so will the model be; "
            "for one of this machine: %s",
            manifest["hardware"],
            here or "no GPU",
            CALIBRATE,
        )


if __name__ == "__main__":
    run_hydra(main)
