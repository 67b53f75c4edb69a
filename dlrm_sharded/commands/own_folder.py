"""The folder of a run, before the run begins: its owner, Hydra's files and the log.

Drivers of sweeps load this module, so it loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.files.remote_files import refuse_password
from dlrm_sharded.ranks.attempt import rank_number
from dlrm_sharded.runs.owner import claim, refuse_former_run

HYDRA_FOLDER = ".hydra"
"""Hydra's default name of the folder for its files; only files there are protected."""


class OwnRunFolder(Callback):
    """Claims the folder of a run on rank 0, before Hydra writes the config and the log there.

    Before that, it refuses overrides that must not be written, because they contain a password.
    """

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with exit_codes(all_ranks_alike=True):  # Hydra ignores errors of a callback
            for override in config.hydra.overrides.task:
                refuse_password(override.partition("=")[0], override)

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        self.on_multirun_start(config)
        if rank_number() == 0:
            with exit_codes(all_ranks_alike=True):
                with resolvable(config) as copy:
                    folder = Path(copy.hydra.run.dir)
                take_folder(config, folder)
                refuse_former_run(folder, config.get("resume"))


@contextmanager
def resolvable(config: DictConfig) -> Iterator[DictConfig]:
    """Yield a copy of a config in which parts such as ${hydra:runtime.choices.data} can be read.

    Such parts refer to Hydra's own config, which Hydra sets only when a job begins.
    """
    hydra = HydraConfig.instance()
    known = hydra.cfg
    copy = config.copy()  # it becomes read-only
    hydra.set_config(copy)
    try:
        yield copy
    finally:
        hydra.cfg = known
        OmegaConf.copy_cache(copy, config)  # times that were resolved stay the same


def take_folder(config: DictConfig, folder: Path) -> None:
    """Claim a folder for a job of this config; end the process if another job owns it.

    Hydra is kept from overwriting its files of an earlier run: the run itself does so when it
    begins, see `hydra_files`.
    """
    with exit_codes(all_ranks_alike=True):
        claim(folder)
        if config.hydra.output_subdir == HYDRA_FOLDER and (folder / HYDRA_FOLDER).exists():
            with read_write(config), open_dict(config):
                config.hydra.output_subdir = None


def hydra_files(cfg: DictConfig) -> dict[str, str]:
    """Return the contents of Hydra's files by path, if `take_folder` kept Hydra from writing them.

    A run writes them itself when it begins.
    """
    if not HydraConfig.initialized() or HydraConfig.get().output_subdir is not None:
        return {}
    hydra = OmegaConf.create({"hydra": HydraConfig.get()})
    files = {"config": cfg, "hydra": hydra, "overrides": HydraConfig.get().overrides.task}
    return {f"{HYDRA_FOLDER}/{name}.yaml": OmegaConf.to_yaml(files[name]) for name in files}
