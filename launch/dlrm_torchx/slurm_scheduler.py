"""TorchX's Slurm scheduler with fixes for logs, cancelled jobs and clusters without accounting.

It is registered in pyproject.toml as `slurm`, so the command line and sweeps use it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.runner.config import get_config
from torchx.schedulers.api import (
    AppDryRunInfo,
    DescribeAppResponse,
    Stream,
    filter_regex,
    split_lines_iterator,
)
from torchx.schedulers.local_scheduler import LogIterator
from torchx.schedulers.slurm_scheduler import SlurmBatchRequest, SlurmScheduler
from torchx.specs import AppDef, AppState, Role, RoleStatus, macros, runopts
from torchx.specs.api import ReplicaStatus

from dlrm_torchx.app import JobRefusedError

SLURM_LOG_DIR = "runs/slurm"
CANCEL_TIMEOUT_S = 60
ACCOUNTING = ("--parsable2", "--noheader", "--format=JobID,JobName,State")
QUEUE = ("--noheader", "--states=all", "--Format=JobArrayID:|,Name:|,State:|,RestartCnt:|,Reason:")
QUEUE_COLUMNS = ("JobID", "JobName", "State", "Restarts", "Reason")
"""Columns of a job in the queue. Old versions of sacct lack restarts, so these are not queried."""


def create_scheduler(session_name: str, **kwargs: object) -> TolerantSlurmScheduler:
    return TolerantSlurmScheduler(session_name)


class TolerantSlurmScheduler(SlurmScheduler):
    """`slurm` with a separate folder for logs, and with every state that Slurm reports.

    TorchX fails an assertion on states that it does not know, such as "CANCELLED by 0", and queries
    only the accounting, which small clusters do not have.
    """

    def _run_opts(self) -> runopts:
        options = super()._run_opts()
        options.add(
            "log_dir", type_=str, default=SLURM_LOG_DIR, help="folder for the output of jobs"
        )
        return options

    def _submit_dryrun(self, app: AppDef, cfg: Any) -> AppDryRunInfo[SlurmBatchRequest]:
        info = super()._submit_dryrun(app, cfg)
        folder = Path(cfg["log_dir"]).resolve()
        for name, replica in info.request.replicas.items():
            replica.name = re.sub(r"[^\w.-]+", "-", app.name) + f"/{name}"  # of the job in Slurm
            for stream, ending in (("output", "out"), ("error", "err")):
                path = folder / f"slurm-{macros.app_id}-{name}.{ending}"
                replica.srun_opts[stream] = str(path)
            # Since Slurm 22.05, a step has one core unless it asks for all cores of its job.
            cpus = replica.sbatch_opts.get("cpus-per-task")
            if cpus is not None:
                replica.srun_opts["cpus-per-task"] = cpus
            # srun's --export cuts a value at its first comma; env(1) does not.
            lists = {key: value for key, value in replica.env.items() if "," in value}
            if lists:
                assignments = [f"{key}={value}" for key, value in lists.items()]
                replica.args = [*assignments, replica.entrypoint, *replica.args]
                replica.entrypoint = "env"
                replica.env = {k: v for k, v in replica.env.items() if k not in lists}
        info.request.cmd.append(f"--output={folder}/slurm-%j.out")
        return info

    def schedule(self, dryrun_info: AppDryRunInfo[SlurmBatchRequest]) -> str:
        """Submit the job; raise JobRefusedError if sbatch refuses it."""
        for replica in dryrun_info.request.replicas.values():
            Path(str(replica.srun_opts["output"])).parent.mkdir(parents=True, exist_ok=True)
        try:
            return super().schedule(dryrun_info)
        except FileNotFoundError:
            raise JobRefusedError("scheduler is slurm, but this machine has no sbatch") from None
        except subprocess.CalledProcessError as error:
            raise JobRefusedError(
                f"sbatch refused the job (exit code {error.returncode}, its message is above); "
                "a cluster without GPUs needs gpu=0"
            ) from None

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Describe a job from the queue, or from the accounting if the queue has forgotten it.

        The accounting lags by seconds: it may report a preempted job as ended that is queued again.
        """
        rows = _rows(["squeue", *QUEUE, "-j", app_id], must_answer=True)
        rows = rows or _rows(["sacct", *ACCOUNTING, "-j", app_id])
        if not rows:
            return None
        statuses: dict[str, RoleStatus] = {}
        for row in rows:
            if row["State"] == "PENDING" and row.get("Reason") not in (None, "None"):
                row["State"] += f" ({row['Reason']})"
            role, _, replica = row["JobName"].rpartition("/")[2].rpartition("-")
            if role and replica.isdigit():
                state = _app_state(row["State"])
                found = ReplicaStatus(id=int(replica), role=role, state=state, hostname="")
                statuses.setdefault(role, RoleStatus(role, [])).replicas.append(found)
        worst = _worst(row["State"] for row in rows)
        return DescribeAppResponse(
            app_id=app_id,
            state=_app_state(worst),
            msg=worst,
            num_restarts=min(int(row.get("Restarts", -1)) for row in rows),
            roles=[Role(of, "", num_replicas=len(one.replicas)) for of, one in statuses.items()],
            roles_statuses=list(statuses.values()),
        )

    def _cancel_existing(self, app_id: str) -> None:
        subprocess.run(["scancel", app_id], check=True, timeout=CANCEL_TIMEOUT_S)

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
        """Return the lines of a log so far, or with `should_tail` until it ends."""
        path = slurm_log(app_id, role_name, k, stream=streams)
        lines: Iterable[str]
        if should_tail:
            lines = split_lines_iterator(LogIterator(app_id, str(path), self))
        elif path.exists():
            lines = path.read_text(errors="replace").splitlines(keepends=True)
        else:
            return [f"no log yet, or none in {path}: started elsewhere, or with another log_dir?\n"]
        return filter_regex(regex, lines) if regex else lines


def slurm_log(
    app_id: str, role: str, replica: int, *, folder: str | None = None, stream: Stream | None = None
) -> Path:
    """Return the path of a replica's output; by default standard error, which has the log."""
    if folder is None:
        folder = get_config(prefix="", name="slurm", key="log_dir") or SLURM_LOG_DIR
    ending = "out" if stream == Stream.STDOUT else "err"
    return Path(folder).resolve() / f"slurm-{app_id}-{role}-{replica}.{ending}"


_SLURM_STATES: Mapping[AppState, Sequence[str]] = {
    AppState.SUCCEEDED: ("COMPLETED",),
    AppState.CANCELLED: ("CANCELLED", "REVOKED"),
    AppState.RUNNING: ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING"),
    AppState.PENDING: (
        *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"),
        *("RESIZING", "SPECIAL_EXIT", "STOPPED", "SUSPENDED"),
    ),
}
"""Slurm's states by TorchX's. All others are failures, such as TIMEOUT, NODE_FAIL, PREEMPTED."""

_GRAVITY = ["SUCCEEDED", "RUNNING", "PENDING", "CANCELLED", "FAILED"]


def _app_state(state: str) -> AppState:
    """Convert Slurm's state, which may have several words: `CANCELLED by 1000`."""
    word = state.split()[0]
    return next((s for s, words in _SLURM_STATES.items() if word in words), AppState.FAILED)


def _worst(states: Iterable[str]) -> str:
    """Return the worst state of a job's parts, which end together: one failure fails the job."""
    return max(states, key=lambda state: _GRAVITY.index(_app_state(state).name))


def _rows(command: list[str], *, must_answer: bool = False) -> list[dict[str, str]]:
    """Return the rows of jobs and their parts (`12+1`), without steps (`12.batch`).

    Args:
        must_answer: whether to raise an error if the command fails, unless the job is unknown.

    Raises:
        subprocess.CalledProcessError: see `must_answer`.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if must_answer and done.returncode and "Invalid job id" not in done.stderr:
        done.check_returncode()
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [
        dict(zip(QUEUE_COLUMNS, row, strict=False))
        for row in rows
        if len(row) in (3, 5) and "." not in row[0] and row[2]
    ]
