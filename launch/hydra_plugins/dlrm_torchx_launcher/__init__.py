"""Hydra's launcher `torchx`, which runs every job of a sweep as a TorchX app of its own.

Hydra loads this module for every command, so imports of TorchX wait in `dlrm_torchx.launch`.
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
    """The options `hydra.launcher.*`, named like those of launch/component.py.

    Args:
        scheduler: the scheduler, as `torchx run -s` takes it.
        scheduler_args: its options, as `torchx run -cfg` takes them, such as {partition: gpu};
            .torchxconfig holds their defaults.
        j: NODESxRANKS; by default, on this machine, one node with all GPUs or with 2 CPU ranks.
        cpu, gpu, memMB: resources of a node; -1 for one GPU per rank, and for eight cores per rank
            with a GPU, two per rank on the CPU.
        max_restarts, max_retries: starts after a failure, by torchrun and by the scheduler.
        env: environment of the ranks, such as {NCCL_DEBUG: INFO}.
        image: container of the ranks; empty for this environment.
        mounts: mounts of the container, such as ["type=bind,src=/data,dst=/data"]; the sweep's
            folder must be mounted under its own path.
        max_parallel: jobs at a time; by default one on this machine and all on a cluster.
        poll_s: seconds between questions to the scheduler.
        patience_s: time that a failed job with retries left has to be queued again, and that an
            unknown job has to become known, before it counts as failed.
        after: function that is called with the sweep's folder when all jobs have ended; its return
            value is logged. An application sets its own as `after_sweep`.
        rounds: number of rounds in which all combinations are measured again, on the same hosts and
            beside one another, by one job that has trained them all; by default, each combination
            is a job of its own.
        until: difference in throughput, such as 0.02: the rounds end when each combination is told
            from the fastest to it, and who is clearly behind is left out early.
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
    rounds: int | None = None
    until: float | None = None


ConfigStore.instance().store(
    group="hydra/launcher", name="torchx", node=TorchXLauncherConf, provider="dlrm_sharded"
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
        from dlrm_torchx.options import SweepOptions

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
