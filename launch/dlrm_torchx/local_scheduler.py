"""TorchX's local scheduler, with apps for `torchx status`, `log` and `cancel` in other terminals.

It is registered in pyproject.toml as `local_cwd`, so the command line and sweeps use it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from torchx.schedulers.api import AppDryRunInfo, DescribeAppResponse, ListAppResponse, Stream
from torchx.schedulers.local_scheduler import (
    COMBINED_LOG,
    ENV_CUDA_VISIBLE_DEVICES,
    STDERR_LOG,
    STDOUT_LOG,
    CWDImageProvider,
    LocalScheduler,
    PopenRequest,
)
from torchx.specs import AppDef, AppState, Role, RoleStatus
from torchx.specs.api import ReplicaStatus, is_terminal

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import read_json_object, replace_file
from dlrm_sharded.ranks.gpus import visible_gpus
from dlrm_sharded.ranks.process import start_ticks
from dlrm_torchx.app import JobRefusedError
from dlrm_torchx.logs import LogFiles

TERMINATION_S = 35
"""Time from SIGTERM to SIGKILL: longer than `torchrun.SHUTDOWN_S`, which ranks have to write a
checkpoint. TorchX's own 10 s would kill the launcher, and its ranks with it."""


MAX_UNKNOWN = 2
"""Queries about an unknown app before an error, because `torchx log` would repeat them for ever."""


def create_scheduler(
    session_name: str, cache_size: int = 100, **kwargs: object
) -> SharedLocalScheduler:
    return SharedLocalScheduler(session_name, cache_size)


class SharedLocalScheduler(LogFiles, LocalScheduler):
    """`local_cwd` with apps that other processes of the same user can see and cancel.

    TorchX keeps apps in the memory of the process that started them. Here a small file in a
    registry describes each app, and its final state is written beside its logs.
    """

    def __init__(self, session_name: str, cache_size: int) -> None:
        super().__init__(session_name, CWDImageProvider, cache_size)
        self._gpus: dict[str, set[str]] = {}
        self._unknown = 0

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[PopenRequest]:
        """Give every replica GPUs of its own, among those that are visible and not in use.

        TorchX counts GPUs from 0, without regard to what is visible and what runs on them.

        Raises:
            JobRefusedError: there are fewer GPUs than the app asks for.
        """
        visible = visible_gpus()
        used = {
            gpu for app_id in self._apps if self._is_running(app_id) for gpu in self._gpus[app_id]
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
                if gpus_by_role[role]:
                    replica.env[ENV_CUDA_VISIBLE_DEVICES] = ",".join(free[: gpus_by_role[role]])
                    free = free[gpus_by_role[role] :]
        return info

    def schedule(self, dryrun_info: AppDryRunInfo[PopenRequest]) -> str:
        app_id = super().schedule(dryrun_info)
        app = self._apps[app_id]
        self._gpus[app_id] = {
            gpu
            for replicas in dryrun_info.request.role_params.values()
            for replica in replicas
            for gpu in replica.env.get(ENV_CUDA_VISIBLE_DEVICES, "").split(",")
        }
        known = {
            "log_dir": str(Path(app.log_dir).resolve()),
            "processes": {
                role: [[replica.proc.pid, start_ticks(replica.proc.pid)] for replica in replicas]
                for role, replicas in app.role_replicas.items()
            },
        }
        _forget_removed()
        replace_file(_registered(app_id), json.dumps(known).encode())
        return app_id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        if app_id not in self._apps:
            response = _describe_foreign(app_id)
            self._unknown += response is None
            if self._unknown > MAX_UNKNOWN:
                raise LookupError(
                    f"{app_id} is unknown: it is mistyped, or its logs were removed; "
                    "`torchx list -s local_cwd` lists the known apps"
                )
            return response
        app = self._apps[app_id]
        try:
            response = super().describe(app_id)
        except json.JSONDecodeError:  # torchrun is still writing its error file
            return DescribeAppResponse(app_id=app_id, state=AppState.RUNNING)
        assert response is not None
        if response.state == AppState.FAILED and (Path(app.log_dir) / "CANCELLED").exists():
            app.set_state(AppState.CANCELLED)
            response.state = AppState.CANCELLED
        known_state = Path(app.log_dir) / "STATE"
        if is_terminal(response.state) and not known_state.exists():
            replace_file(known_state, response.state.name.encode())
        return response

    def _is_running(self, app_id: str) -> bool:
        replicas = self._apps[app_id].role_replicas.values()
        return any(replica.is_alive() for role in replicas for replica in role)

    def log_path(self, app_id: str, role: str, replica: int, stream: Stream | None) -> Path:
        name = {Stream.STDOUT: STDOUT_LOG, Stream.STDERR: STDERR_LOG}.get(stream, COMBINED_LOG)
        known = _known(app_id) or {"log_dir": ""}  # `torchx log` asks about known apps only
        return Path(known["log_dir"]) / role / str(replica) / name

    def list(self) -> list[ListAppResponse]:
        responses = []
        for path in sorted(_registry().glob("*.json"), key=lambda path: path.stat().st_mtime):
            app_id = path.stem
            response = self.describe(app_id) if app_id in self._apps else _describe_foreign(app_id)
            if response is not None:
                responses.append(ListAppResponse(app_id=app_id, state=response.state))
        return responses

    def _cancel_existing(self, app_id: str) -> None:
        known = _known(app_id)
        if known is not None:
            (Path(known["log_dir"]) / "CANCELLED").touch()
            _end([known])
        if app_id in self._apps:
            super()._cancel_existing(app_id)
            self.describe(app_id)

    def close(self) -> None:
        """End all apps of this process together, with time for their checkpoints."""
        _end([known for app_id in self._apps if (known := _known(app_id)) is not None])
        super().close()


def _registry() -> Path:
    folder = Path(tempfile.gettempdir()) / f"dlrm_torchx-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} is not a folder of this user")
    return folder


def _forget_removed() -> None:
    """Remove apps whose logs are gone from the registry."""
    for path in _registry().glob("*.json"):
        known = _known(path.stem)
        if known is not None and not Path(known["log_dir"]).is_dir():
            path.unlink(missing_ok=True)


def _registered(app_id: str) -> Path:
    return _registry() / f"{app_id}.json"


def _known(app_id: str) -> dict[str, Any] | None:
    try:
        known = read_json_object(_registered(app_id), noun="app")
    except ConfigError:
        return None
    return known if {"log_dir", "processes"} <= known.keys() else None


def _running(known: dict[str, Any]) -> list[int]:
    """Return the replicas that still run; by now, their ids may belong to other processes."""
    return [
        pid
        for replicas in known["processes"].values()
        for pid, started in replicas
        if started is not None and start_ticks(pid) == started
    ]


def _describe_foreign(app_id: str) -> DescribeAppResponse | None:
    """Describe an app that another process started."""
    known = _known(app_id)
    if known is None or not Path(known["log_dir"]).is_dir():
        return None
    folder = Path(known["log_dir"])
    if (folder / "STATE").exists():
        state = AppState[(folder / "STATE").read_text()]
    elif _running(known):
        state = AppState.RUNNING
    else:
        # The process that would have recorded the final state is gone too.
        state = AppState.CANCELLED if (folder / "CANCELLED").exists() else AppState.FAILED
    return DescribeAppResponse(
        app_id=app_id,
        state=state,
        roles=[
            Role(name=role, image="", num_replicas=len(replicas))
            for role, replicas in known["processes"].items()
        ],
        roles_statuses=[
            RoleStatus(
                role,
                [
                    ReplicaStatus(id=i, state=state, role=role, hostname="localhost")
                    for i in range(len(replicas))
                ],
            )
            for role, replicas in known["processes"].items()
        ],
        ui_url=folder.as_uri(),
    )


def _end(apps: list[dict[str, Any]]) -> None:
    """End apps together, with time for the checkpoints of their ranks."""

    def running() -> list[int]:
        return [pid for known in apps for pid in _running(known)]

    for pid in running():
        os.killpg(pid, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATION_S
    while running() and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in running():
        os.killpg(pid, signal.SIGKILL)
