"""The options of a sweep: `hydra.launcher.*`.

Hydra loads this module for every command, so it imports other packages only to check options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOCAL_POLL_S = 0.1
CLUSTER_POLL_S = 5.0


@dataclass
class SweepOptions:
    """The options `hydra.launcher.*`, named like those of launch/component.py.

    Args:
        scheduler: name of the scheduler, as for `torchx run -s`.
        scheduler_args: its options, as for `torchx run -cfg`, such as {partition: gpu};
            .torchxconfig has their defaults.
        j: NODESxRANKS; by default, on this machine, one node with all GPUs or with 2 CPU ranks.
        cpu, gpu, memMB: resources of a node; -1 for one GPU per rank, and for eight cores per rank
            with a GPU, two per rank on the CPU.
        max_restarts, max_retries: numbers of restarts after a failure, by torchrun and by the
            scheduler.
        env: environment of the ranks, such as {NCCL_DEBUG: INFO}.
        image: container of the ranks; empty for this environment.
        mounts: mounts of the container, such as ["type=bind,src=/data,dst=/data"]; the sweep's
            folder must be mounted under its own path.
        max_parallel: number of jobs at a time; by default one on this machine, and all on a
            cluster.
        poll_s: seconds between requests to the scheduler.
        after: function that is called with the sweep's folder when all jobs have ended; its return
            value is logged. Applications can set it by the key `after_sweep`.
        rounds: number of rounds in which all combinations are measured again, on the same hosts and
            in turn, by one job that has trained them all; by default, each combination is a
            separate job.

    Raises:
        ConfigError: an option has a wrong value.
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
    after: str | None = "${oc.select:after_sweep,null}"
    rounds: int | None = None

    def __post_init__(self) -> None:
        from hydra.utils import get_method
        from torchx.schedulers import get_scheduler_factories

        from dlrm_sharded.files.errors import ConfigError, check_choice, check_count, check_number

        known = sorted(get_scheduler_factories())
        check_choice("hydra.launcher.scheduler", self.scheduler, known)
        for key, kind, text in (
            ("scheduler_args", Mapping, "like {a: b}"),
            ("env", Mapping, "like {a: b}"),
            ("mounts", Sequence, "a list"),
        ):
            value = getattr(self, key)
            if value is not None and (isinstance(value, str) or not isinstance(value, kind)):
                raise ConfigError(f"hydra.launcher.{key} is {value!r}; it must be {text}")
        for key, value in (self.env or {}).items():
            if value is None:
                raise ConfigError(f"hydra.launcher.env.{key} is null; it must have a value")
        for key in ("max_parallel", "rounds"):
            if (count := getattr(self, key)) is not None:
                check_count(f"hydra.launcher.{key}", count, least=1)
        if self.poll_s is not None:
            check_number("hydra.launcher.poll_s", self.poll_s, above=True)
        if self.after is not None:
            try:
                get_method(self.after)
            except Exception as error:  # an import may raise any error
                raise ConfigError(f"hydra.launcher.after is {self.after!r}: {error}") from error

    @property
    def is_local(self) -> bool:
        return self.scheduler.startswith("local")
