"""Hydra's launcher `torchx`, which runs the jobs of a sweep as TorchX apps.

Hydra loads this module for every command, so TorchX is imported only in `dlrm_torchx.launch`.
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from dlrm_torchx.options import SweepOptions

ConfigStore.instance().store(
    group="hydra/launcher", name="torchx", node=SweepOptions, provider="dlrm_sharded"
)


class TorchXLauncher(Launcher):
    """Starts the jobs of a batch, waits for them, and returns their results."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._setup: tuple[HydraContext, TaskFunction, DictConfig] | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self._setup = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from dlrm_torchx.launch import launch

        assert self._setup is not None
        return launch(SweepOptions(**self._options), job_overrides, initial_job_idx, *self._setup)
