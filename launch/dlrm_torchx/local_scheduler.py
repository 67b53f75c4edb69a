"""TorchX's local scheduler, with separate GPUs for each app, and time for a checkpoint.

It is registered in pyproject.toml as `local_cwd`, so the command line and sweeps use it.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Collection
from typing import Any

from torchx.schedulers.api import AppDryRunInfo
from torchx.schedulers.local_scheduler import (
    ENV_CUDA_VISIBLE_DEVICES,
    CWDImageProvider,
    LocalScheduler,
    PopenRequest,
)
from torchx.specs import AppDef

from dlrm_sharded.ranks.gpus import visible_gpus
from dlrm_sharded.ranks.process import ENDS_WITH_PARENT
from dlrm_torchx.app import JobRefusedError

TERMINATION_S = 35
"""Time from SIGTERM to SIGKILL: longer than `torchrun.SHUTDOWN_S`, in which ranks write a
checkpoint. After TorchX's 10 s, the launcher would be killed, and its ranks with it."""


def create_scheduler(
    session_name: str, cache_size: int = 100, **kwargs: object
) -> PatientLocalScheduler:
    return PatientLocalScheduler(session_name, CWDImageProvider, cache_size)


class PatientLocalScheduler(LocalScheduler):
    """`local_cwd` whose apps have time for a checkpoint, even if this process is killed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._gpus: dict[str, set[str]] = {}

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[PopenRequest]:
        """Give every replica its own GPUs, among those that are visible and not in use.

        TorchX counts GPUs from 0, whether or not they are visible and free.

        Raises:
            JobRefusedError: fewer GPUs are free than the app asks for.
        """
        visible = visible_gpus()
        used = {
            gpu for app_id in self._apps if self._running([app_id]) for gpu in self._gpus[app_id]
        }
        free = [gpu for gpu in visible if gpu not in used]
        gpus_by_role = {role.name: role.resource.gpu if visible else 0 for role in app.roles}
        total = sum(gpus_by_role[role.name] * role.num_replicas for role in app.roles)
        if total > len(free):
            raise JobRefusedError(
                f"j and gpu request {total} GPUs, but this machine has {len(visible)}, of "
                f"which {len(free)} are free; give fewer ranks, or gpu=0 for ranks on the CPU"
            )
        for role in app.roles:
            role.resource = dataclasses.replace(role.resource, gpu=0)
        info = super()._submit_dryrun(app, cfg)
        for role, replicas in info.request.role_params.items():
            for replica in replicas:
                replica.env[ENDS_WITH_PARENT] = "1"
                if gpus_by_role[role]:
                    replica.env[ENV_CUDA_VISIBLE_DEVICES] = ",".join(free[: gpus_by_role[role]])
                    free = free[gpus_by_role[role] :]
        return info

    def schedule(self, dryrun_info: AppDryRunInfo[PopenRequest]) -> str:
        app_id = super().schedule(dryrun_info)
        self._gpus[app_id] = {
            gpu
            for replicas in dryrun_info.request.role_params.values()
            for replica in replicas
            for gpu in replica.env.get(ENV_CUDA_VISIBLE_DEVICES, "").split(",")
        }
        return app_id

    def _cancel_existing(self, app_id: str) -> None:
        self._end([app_id])
        super()._cancel_existing(app_id)

    def close(self) -> None:
        """End all apps together."""
        self._end(self._apps)
        super().close()

    def _end(self, app_ids: Collection[str]) -> None:
        for pid in self._running(app_ids):
            os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + TERMINATION_S
        while self._running(app_ids) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in self._running(app_ids):
            os.killpg(pid, signal.SIGKILL)

    def _running(self, app_ids: Collection[str]) -> list[int]:
        """Return the pids of replicas that still run."""
        replicas = [r for app in app_ids for r in self._apps[app].role_replicas.values()]
        return [one.proc.pid for role in replicas for one in role if one.is_alive()]
