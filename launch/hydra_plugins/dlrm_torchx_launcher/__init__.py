"""Hydra's launcher `torchx`: every job of a sweep is a TorchX app of its own.

Hydra loads this module for every command; what needs TorchX waits in `dlrm_torchx.sweep`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class TorchXLauncherConf:
    """`hydra.launcher.*`; the words are those of launch/component.py.

    Args:
        scheduler: what `torchx run -s` takes.
        scheduler_args: what `torchx run -cfg` takes, such as {partition: gpu}; .torchxconfig holds
            their defaults.
        j: NODESxRANKS; on this machine one node of all GPUs, or of two CPU ranks, unless given.
        cpu, gpu, memMB: of a node; -1 for two cores a rank, one GPU a rank.
        mounts: of the container, such as ["type=bind,src=/data,dst=/data"]; the sweep's folder must
            be there under its own path.
        max_parallel: jobs at a time; one on this machine and all on a cluster, unless given.
        env: of the ranks, such as {NCCL_DEBUG: INFO}.
        poll_s: how often the scheduler is asked.
        patience_s: for how long a failed job with retries left may wait to be queued again, and an
            unknown one to be known, before it has failed.
        after: a function of the sweep's folder, called when all jobs have ended; what it returns
            is shown. An application names its own as `after_sweep`.
    """

    _target_: str = "hydra_plugins.dlrm_torchx_launcher.TorchXLauncher"
    scheduler: str = "local_cwd"
    scheduler_args: Any = None
    j: str | None = None
    cpu: int = -1
    gpu: int = -1
    memMB: int = 0  # noqa: N815, as TorchX's own components call it
    max_restarts: int = 0
    max_retries: int = 0
    env: Any = None
    image: str = ""
    mounts: Any = None
    max_parallel: int | None = None
    poll_s: float | None = None
    patience_s: float = 120.0
    after: str | None = "${oc.select:after_sweep,null}"


ConfigStore.instance().store(
    group="hydra/launcher", name="torchx", node=TorchXLauncherConf, provider="dlrm_sharded"
)


class TorchXLauncher(Launcher):
    """Starts the jobs of a batch, waits for them, and returns what they returned."""

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
        from dlrm_torchx.options import SweepOptions
        from dlrm_torchx.sweep import launch

        assert self._setup is not None
        hydra_context, task_function, config = self._setup
        return launch(
            SweepOptions(**self._options),
            job_overrides,
            first_num=initial_job_idx,
            hydra_context=hydra_context,
            task_function=task_function,
            config=config,
        )
