"""The command: `torchrun --standalone --nproc-per-node N -m dlrm_sharded.train sharder=dim`.

With `-m sharder=random,dim` and without torchrun it is the driver of a sweep, which starts a job
for every combination. A driver does not train: torch is loaded by the ranks alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from dlrm_sharded.commands.cli import exit_codes, run_hydra
from dlrm_sharded.errors import ConfigError

CONF_DIR = str(Path(__file__).resolve().parents[1] / "conf")
QUIET_RANK = ["hydra.output_subdir=null", "hydra.run.dir=.", "hydra/job_logging=disabled"]
"""Overrides of ranks above 0: rank 0 alone writes files and logs."""


@hydra.main(version_base="1.3", config_path=CONF_DIR, config_name="train")
def hydra_main(cfg: DictConfig) -> float:
    from dlrm_sharded.commands.job import train

    with exit_codes():
        return train(cfg)


def main() -> None:
    """Exit codes: 0; 2 for what the user can mend, with one message; 1 for anything else."""
    if "RANK" not in os.environ:
        run_hydra(hydra_main)
        return
    from torch.distributed.elastic.multiprocessing.errors import record

    if int(os.environ["RANK"]) > 0:
        sys.argv += QUIET_RANK
    with exit_codes(all_ranks_alike=True):
        if {"-m", "--multirun"} & set(sys.argv[1:]):
            raise ConfigError("under torchrun every rank would sweep; start -m without torchrun")
    record(run_hydra)(hydra_main)


if __name__ == "__main__":
    # By its own name, not as __main__: under that name the ranks of a sweep find `hydra_main`.
    from dlrm_sharded.train import main as main_by_name

    main_by_name()
