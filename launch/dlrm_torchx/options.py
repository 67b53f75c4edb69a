"""The options of a sweep: `hydra.launcher.*`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.utils import get_method
from torchx.runner import Runner
from torchx.runner.config import apply as apply_torchxconfig
from torchx.schedulers import get_scheduler_factories
from torchx.specs import AppDef, InvalidRunConfigException, parse_mounts

from dlrm_sharded.files.errors import ConfigError, check_count, check_number
from dlrm_sharded.ranks.attempt import RESTARTS_VARIABLE
from dlrm_sharded.ranks.gpus import visible_gpus
from dlrm_torchx.app import RENDEZVOUS_PORTS, JobShape, torchrun_app
from hydra_plugins.dlrm_torchx_launcher import TorchXLauncherConf

RANKS_WITHOUT_GPUS = 2
LOCAL_POLL_S = 0.1
CLUSTER_POLL_S = 5.0
CONTAINER_SCHEDULERS = ("kubernetes", "kubernetes_mcad", "aws_batch", "local_docker")
"""Schedulers whose containers see only what is mounted."""


@dataclass(kw_only=True)
class SweepOptions(TorchXLauncherConf):
    """The checked options of `hydra.launcher.*`."""

    _first_port: int = field(default_factory=lambda: random.choice(RENDEZVOUS_PORTS))

    def __post_init__(self) -> None:
        known = sorted(get_scheduler_factories())
        if self.scheduler not in known:
            raise ConfigError(
                f"hydra.launcher.scheduler is {self.scheduler!r}; known: {', '.join(known)}"
            )
        for key, value in (("scheduler_args", self.scheduler_args), ("env", self.env)):
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"hydra.launcher.{key} is {value!r}, must be like {{a: b}}")
        if unset := [key for key, value in (self.env or {}).items() if value is None]:
            raise ConfigError(f"hydra.launcher.env.{unset[0]} is null, must have a value")
        if self.mounts is not None and (
            isinstance(self.mounts, str) or not isinstance(self.mounts, Sequence)
        ):
            raise ConfigError(f"hydra.launcher.mounts is {self.mounts!r}, must be a list")
        if self.max_parallel is not None:
            check_count("hydra.launcher.max_parallel", self.max_parallel, least=1)
        if self.poll_s is not None:
            check_number("hydra.launcher.poll_s", self.poll_s, above=True)
        if self.rounds is not None:
            check_count("hydra.launcher.rounds", self.rounds, least=1)
        if self.until is not None:
            check_number("hydra.launcher.until", self.until, most=1.0, above=True)
            if self.rounds is None:
                raise ConfigError("hydra.launcher.until ends rounds; set hydra.launcher.rounds")
        check_number("hydra.launcher.patience_s", self.patience_s)
        if self.after is not None:
            try:
                get_method(self.after)
            except Exception as error:  # whatever an import raises
                raise ConfigError(f"hydra.launcher.after is {self.after!r}: {error}") from error

    @property
    def is_local(self) -> bool:
        return self.scheduler.startswith("local")

    def shape(self) -> JobShape:
        """Return the shape of every job of the sweep.

        Raises:
            ConfigError: a key of hydra.launcher has a wrong value.
        """
        j = self.j
        if j is None:
            if not self.is_local:
                raise ConfigError(
                    f"hydra.launcher.j is not set; give NODESxRANKS for {self.scheduler}, such as "
                    "hydra.launcher.j=2x8"
                )
            j = f"1x{len(visible_gpus()) or RANKS_WITHOUT_GPUS}"
        try:
            return JobShape.parse(
                j, self.cpu, self.gpu, self.memMB, self.max_restarts, self.max_retries
            )
        except ConfigError as error:
            raise ConfigError(f"hydra.launcher.{error}") from None

    def jobs_at_a_time(self, num_jobs: int) -> int:
        return self.max_parallel or (1 if self.is_local else max(num_jobs, 1))

    def seconds_between_polls(self) -> float:
        return self.poll_s or (LOCAL_POLL_S if self.is_local else CLUSTER_POLL_S)

    def check_shared(self, folder: Path) -> None:
        """Raise ConfigError unless a mount shows a sweep's folder to the containers of its jobs."""
        if not self.image or self.scheduler not in CONTAINER_SCHEDULERS:
            return
        mounts = parse_mounts(list(self.mounts or []))
        if not any(folder.is_relative_to(mount.dst_path) for mount in mounts):
            raise ConfigError(
                f"no hydra.launcher.mounts has {folder} in its dst, where the containers would "
                "look for their call; mount a disk that they share with this machine under its "
                "own path, or give a hydra.sweep.dir on it"
            )

    def args_for(self, runner: Runner) -> dict[str, Any]:
        """Return the scheduler's own options, with the defaults of .torchxconfig.

        Raises:
            ConfigError: the scheduler has no such option, or a value has a wrong type.
        """
        options = runner.scheduler_run_opts(self.scheduler)
        known = {name for name, _ in options}
        args = dict(self.scheduler_args or {})
        for name in args:
            if name not in known:
                raise ConfigError(
                    f"hydra.launcher.scheduler_args.{name} is not an option of {self.scheduler}; "
                    f"known: {', '.join(sorted(known))}"
                )
        apply_torchxconfig(self.scheduler, args)
        try:
            options.resolve(args)
        except InvalidRunConfigException as error:
            raise ConfigError(f"hydra.launcher.scheduler_args: {error}") from None
        return args

    def app(
        self,
        job_name: str,
        num: int,
        folder: Path,
        *,
        is_restart: bool = False,
        program: str = "dlrm_torchx.worker",
    ) -> AppDef:
        """Return the app of one job, with a rendezvous port that no other job of the sweep has.

        Args:
            is_restart: whether the job's folder holds an attempt that was stopped.
            program: module that every rank runs, with the folder as its argument.
        """
        env = {key: str(value) for key, value in (self.env or {}).items()}
        first = RENDEZVOUS_PORTS.index(self._first_port)
        port = RENDEZVOUS_PORTS[(first + num) % len(RENDEZVOUS_PORTS)]
        return torchrun_app(
            program,
            [str(folder)],
            self.shape(),
            name=f"{job_name}-{num}".replace("_", "-"),
            image=self.image,
            env=env | ({RESTARTS_VARIABLE: "1"} if is_restart else {}),
            rdzv_port=port,
            mounts=parse_mounts(list(self.mounts or [])),
        )
