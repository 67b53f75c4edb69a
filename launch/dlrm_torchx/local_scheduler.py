"""TorchX's local scheduler, with apps that other processes see: `torchx status`, `log`, `cancel`.

Registered in pyproject.toml under TorchX's own name, so that the command line and sweeps use it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.schedulers.api import AppDryRunInfo, DescribeAppResponse, ListAppResponse, Stream
from torchx.schedulers.local_scheduler import (
    COMBINED_LOG,
    STDERR_LOG,
    STDOUT_LOG,
    CWDImageProvider,
    LocalScheduler,
    PopenRequest,
)
from torchx.specs import AppDef, AppState, Role, RoleStatus
from torchx.specs.api import ReplicaStatus, is_terminal

from dlrm_torchx.app import JobRefusedError, count_local_gpus
from dlrm_torchx.logs import log_lines

TERMINATION_S = 10
"""From SIGTERM to SIGKILL for an app of another process; TorchX's own patience."""


def create_scheduler(
    session_name: str, cache_size: int = 100, **kwargs: object
) -> SharedLocalScheduler:
    return SharedLocalScheduler(session_name, CWDImageProvider, cache_size)


class SharedLocalScheduler(LocalScheduler):
    """`local_cwd`, with apps that other processes of the same user can see and end too.

    TorchX keeps them in the memory of the process that started them. A small file says here what
    they are; their state stands beside their logs.
    """

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[PopenRequest]:
        num_gpus = count_local_gpus()
        for role in app.roles:
            wanted = role.resource.gpu * role.num_replicas
            if wanted > num_gpus > 0:
                raise JobRefusedError(
                    f"j and gpu ask for {wanted} GPUs, this machine has {num_gpus}; "
                    "give fewer ranks, or gpu=0 for ranks on the CPU"
                )
            if num_gpus == 0:
                role.resource = dataclasses.replace(role.resource, gpu=0)
        return super()._submit_dryrun(app, {**cfg, "auto_set_cuda_visible_devices": num_gpus > 0})

    def schedule(self, dryrun_info: AppDryRunInfo[PopenRequest]) -> str:
        app_id = super().schedule(dryrun_info)
        app = self._apps[app_id]
        known = {
            "log_dir": str(Path(app.log_dir).resolve()),
            "pids": {
                role: [replica.proc.pid for replica in replicas]
                for role, replicas in app.role_replicas.items()
            },
        }
        _forget_removed()
        _registered(app_id).write_text(json.dumps(known))
        return app_id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        if app_id not in self._apps:
            return _describe_foreign(app_id)
        app = self._apps[app_id]
        response = super().describe(app_id)
        assert response is not None
        if response.state == AppState.FAILED and (Path(app.log_dir) / "CANCELLED").exists():
            app.set_state(AppState.CANCELLED)
            response.state = AppState.CANCELLED
        if is_terminal(response.state):
            (Path(app.log_dir) / "STATE").write_text(response.state.name)
        return response

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        known = _known(app_id)
        if app_id in self._apps or known is None:
            return super().log_iter(app_id, role_name, k, regex, since, until, should_tail, streams)
        name = {Stream.STDOUT: STDOUT_LOG, Stream.STDERR: STDERR_LOG}.get(streams, COMBINED_LOG)
        path = Path(known["log_dir"]) / role_name / str(k) / name
        return log_lines(path, app_id, self, regex, should_tail)

    def list(self) -> list[ListAppResponse]:
        found = []
        for path in sorted(_registry().glob("*.json"), key=lambda path: path.stat().st_mtime):
            response = self.describe(path.stem)
            if response is not None:
                found.append(ListAppResponse(app_id=path.stem, state=response.state))
        return found

    def _cancel_existing(self, app_id: str) -> None:
        known = _known(app_id)
        if known is not None:
            (Path(known["log_dir"]) / "CANCELLED").touch()
        if app_id in self._apps:
            super()._cancel_existing(app_id)
            self.describe(app_id)
        elif known is not None:
            _end([pid for pids in known["pids"].values() for pid in pids])


def _registry() -> Path:
    folder = Path(tempfile.gettempdir()) / f"dlrm_torchx-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _forget_removed() -> None:
    for path in _registry().glob("*.json"):
        if _known(path.stem) is None:
            path.unlink(missing_ok=True)


def _registered(app_id: str) -> Path:
    return _registry() / f"{app_id}.json"


def _known(app_id: str) -> dict[str, Any] | None:
    try:
        known: dict[str, Any] = json.loads(_registered(app_id).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return known if Path(known["log_dir"]).is_dir() else None


def _describe_foreign(app_id: str) -> DescribeAppResponse | None:
    """An app that another process started, and may have ended with."""
    known = _known(app_id)
    if known is None:
        return None
    folder = Path(known["log_dir"])
    running = [pid for pids in known["pids"].values() for pid in pids if _is_alive(pid)]
    if (folder / "STATE").exists():
        state = AppState[(folder / "STATE").read_text()]
    elif running:
        state = AppState.RUNNING
    else:
        # Nobody has seen how it ended: the process that would have is gone too.
        state = AppState.CANCELLED if (folder / "CANCELLED").exists() else AppState.FAILED
    return DescribeAppResponse(
        app_id=app_id,
        state=state,
        roles=[
            Role(name=role, image="", num_replicas=len(pids))
            for role, pids in known["pids"].items()
        ],
        roles_statuses=[
            RoleStatus(
                role,
                [
                    ReplicaStatus(id=i, state=state, role=role, hostname="localhost")
                    for i in range(len(pids))
                ],
            )
            for role, pids in known["pids"].items()
        ],
        ui_url=folder.as_uri(),
    )


def _is_alive(pid: int) -> bool:
    """Whether the leader of a process group runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and os.getpgid(pid) == pid
    except (FileNotFoundError, ProcessLookupError):
        return False


def _end(pids: list[int]) -> None:
    alive = [pid for pid in pids if _is_alive(pid)]
    for pid in alive:
        os.killpg(pid, signal.SIGTERM)
    deadline = time.monotonic() + TERMINATION_S
    while any(map(_is_alive, alive)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in filter(_is_alive, alive):
        os.killpg(pid, signal.SIGKILL)
