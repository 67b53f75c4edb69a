"""TorchX's local and Slurm schedulers, mended where `torchx status`, `log` and `cancel` fail users.

Registered in pyproject.toml under TorchX's own names, so that the command line and sweeps use them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.schedulers.api import (
    AppDryRunInfo,
    DescribeAppResponse,
    ListAppResponse,
    Scheduler,
    Stream,
    filter_regex,
    split_lines_iterator,
)
from torchx.schedulers.local_scheduler import (
    COMBINED_LOG,
    STDERR_LOG,
    STDOUT_LOG,
    CWDImageProvider,
    LocalScheduler,
    LogIterator,
    PopenRequest,
)
from torchx.schedulers.slurm_scheduler import SlurmBatchRequest, SlurmScheduler
from torchx.specs import AppDef, AppState, Role, RoleStatus, macros, runopts
from torchx.specs.api import ReplicaStatus, is_terminal

from dlrm_torchx.app import JobRefusedError, count_local_gpus

TERMINATION_S = 10
"""From SIGTERM to SIGKILL for an app of another process; TorchX's own patience."""

SLURM_LOG_DIR = "runs/slurm"


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
        return _lines(path, app_id, self, regex, should_tail)

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


class TolerantSlurmScheduler(SlurmScheduler):
    """`slurm`, with logs in a folder of their own, and words for what Slurm says of a job.

    TorchX asserts that it knows Slurm's state, which a cancelled job's is not ("CANCELLED by 0"),
    and asks the accounting only, which small clusters do not have.
    """

    def _run_opts(self) -> runopts:
        options = super()._run_opts()
        options.add(
            "log_dir", type_=str, default=SLURM_LOG_DIR, help="where the output of jobs goes"
        )
        return options

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[SlurmBatchRequest]:
        info = super()._submit_dryrun(app, cfg)
        folder = Path(cfg["log_dir"]).resolve()
        for name, replica in info.request.replicas.items():
            for stream, ending in (("output", "out"), ("error", "err")):
                path = folder / f"slurm-{macros.app_id}-{name}.{ending}"
                replica.srun_opts[stream] = str(path)
            # Since Slurm 22.05 a step has one core, unless it asks for those of its job.
            cpus = replica.sbatch_opts.get("cpus-per-task")
            if cpus is not None:
                replica.srun_opts["cpus-per-task"] = cpus
        info.request.cmd.append(f"--output={folder}/slurm-%j.out")
        return info

    def schedule(self, dryrun_info: AppDryRunInfo[SlurmBatchRequest]) -> str:
        """Raises JobRefusedError for what sbatch refuses."""
        for replica in dryrun_info.request.replicas.values():
            Path(str(replica.srun_opts["output"])).parent.mkdir(parents=True, exist_ok=True)
        try:
            return super().schedule(dryrun_info)
        except FileNotFoundError:
            raise JobRefusedError("scheduler is slurm, but this machine has no sbatch") from None
        except subprocess.CalledProcessError as error:
            raise JobRefusedError(
                f"sbatch refused the job (exit code {error.returncode}, its words are above); "
                "a cluster without GPUs needs gpu=0"
            ) from None

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """As the queue says, and for a job that it has forgotten, the accounting.

        The accounting is seconds late: it calls a preempted job ended that the queue runs again.
        """
        rows = _queued(app_id) or _accounted(app_id)
        if not rows:
            return None
        statuses: dict[str, RoleStatus] = {}
        for row in rows:
            role, _, replica = row["JobName"].rpartition("-")
            if role and replica.isdigit():
                found = statuses.setdefault(role, RoleStatus(role, []))
                state = _app_state(row["State"])
                found.replicas.append(
                    ReplicaStatus(id=int(replica), role=role, state=state, hostname="")
                )
        # The parts of one job end together, so that any that did not succeed speaks for all.
        words = [row["State"] for row in rows]
        worst = max(words, key=lambda word: _GRAVITY.index(_app_state(word)))
        return DescribeAppResponse(
            app_id=app_id,
            state=_app_state(worst),
            msg=worst,
            roles=[
                Role(name=role, image="", num_replicas=len(status.replicas))
                for role, status in statuses.items()
            ],
            roles_statuses=list(statuses.values()),
        )

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
        path = slurm_log(app_id, role_name, k, stream=streams)
        return _lines(path, app_id, self, regex, should_tail)


def _lines(
    path: Path, app_id: str, scheduler: Scheduler[Any], regex: str | None, should_tail: bool
) -> Iterable[str]:
    """What a log has now, or all lines to come; TorchX's own iterator always waits for the end."""
    lines: Iterable[str]
    if should_tail:
        lines = split_lines_iterator(LogIterator(app_id, str(path), scheduler))
    else:
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = text.splitlines(keepends=True)
    return filter_regex(regex, lines) if regex else lines


def slurm_log(
    app_id: str, role: str, replica: int, *, folder: str | None = None, stream: Stream | None = None
) -> Path:
    """Where a replica's output goes: standard error, as logs are, unless asked for the other."""
    if folder is None:
        from torchx.runner.config import get_config

        folder = get_config(prefix="", name="slurm", key="log_dir") or SLURM_LOG_DIR
    ending = "out" if stream == Stream.STDOUT else "err"
    return Path(folder).resolve() / f"slurm-{app_id}-{role}-{replica}.{ending}"


_SLURM_STATES: Mapping[str, AppState] = {
    "COMPLETED": AppState.SUCCEEDED,
    "CANCELLED": AppState.CANCELLED,
    "REVOKED": AppState.CANCELLED,
    "RUNNING": AppState.RUNNING,
    "COMPLETING": AppState.RUNNING,
    "STAGE_OUT": AppState.RUNNING,
    "SIGNALING": AppState.RUNNING,
    "PENDING": AppState.PENDING,
    "CONFIGURING": AppState.PENDING,
    "REQUEUED": AppState.PENDING,
    "REQUEUE_HOLD": AppState.PENDING,
    "REQUEUE_FED": AppState.PENDING,
    "RESV_DEL_HOLD": AppState.PENDING,
    "RESIZING": AppState.PENDING,
    "SPECIAL_EXIT": AppState.PENDING,
    "STOPPED": AppState.PENDING,
    "SUSPENDED": AppState.PENDING,
}
"""Any other word is the name of a failure: FAILED, TIMEOUT, OUT_OF_MEMORY, NODE_FAIL, PREEMPTED."""

_GRAVITY = (
    AppState.SUCCEEDED,
    AppState.RUNNING,
    AppState.PENDING,
    AppState.CANCELLED,
    AppState.FAILED,
)


def _app_state(word: str) -> AppState:
    """For Slurm's word, which may go on: `CANCELLED by 1000`."""
    return _SLURM_STATES.get(word.split()[0], AppState.FAILED)


def _accounted(app_id: str) -> list[dict[str, str]]:
    """What the accounting has on a job and its parts (`12+1`), without their steps (`12.batch`)."""
    return _rows(
        ["sacct", "--parsable2", "--noheader", "--format=JobID,JobName,State", "-j", app_id]
    )


def _queued(app_id: str) -> list[dict[str, str]]:
    return _rows(["squeue", "--noheader", "--states=all", "--format=%i|%j|%T", "-j", app_id])


def _rows(command: list[str]) -> list[dict[str, str]]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [
        dict(zip(("JobID", "JobName", "State"), row, strict=True))
        for row in rows
        if len(row) == 3 and "." not in row[0] and row[2]
    ]


def create_local(
    session_name: str, cache_size: int = 100, **kwargs: object
) -> SharedLocalScheduler:
    return SharedLocalScheduler(session_name, CWDImageProvider, cache_size)


def create_slurm(session_name: str, **kwargs: object) -> TolerantSlurmScheduler:
    return TolerantSlurmScheduler(session_name)
