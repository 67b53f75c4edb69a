"""One training run: `torchrun --standalone --nproc-per-node N -m dlrm_sharded.train sharder=dim`.

Without torchrun it is also installed as `dlrm-train`. With `-m sharder=random,dim` it drives a
sweep, which starts a job for every combination. A driver does not train: only ranks load torch.
"""

from __future__ import annotations

import os

import hydra
from omegaconf import DictConfig

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.hydra_app import run_hydra
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.ranks.process import die_with_parent

QUIET_RANK = ["hydra.output_subdir=null", "hydra.run.dir=.", "hydra/job_logging=disabled"]
"""Overrides for ranks above 0, because only rank 0 writes files and logs."""


@hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="train")
def hydra_main(cfg: DictConfig) -> float:
    from dlrm_sharded.commands.train import train

    with exit_codes():
        return train(cfg)


def main() -> None:
    """Run, and exit with 0, with 2 and one message for errors users can fix, or else with 1."""
    if "RANK" not in os.environ:
        run_hydra(hydra_main)
        return
    die_with_parent()  # before torch is loaded, which takes seconds
    with exit_codes(all_ranks_alike=True):
        from torch.distributed.elastic.multiprocessing.errors import record

    record(run_hydra)(hydra_main, quiet=QUIET_RANK)


if __name__ == "__main__":
    # The ranks of a sweep import `hydra_main` by its module, which must not be __main__.
    from dlrm_sharded.train import main as main_by_name

    main_by_name()
