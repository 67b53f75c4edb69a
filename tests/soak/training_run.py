"""A training run of several ranks on this machine that can be interrupted and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dlrm_sharded.checkpoint.folder import FOLDER_NAME, checkpoints
from tests import preloaded
from tests.preloaded import ROOT

MARK = "DLRM_SHARDED_SOAK_RUN"
"""Environment variable by which the processes of a run are found, also those without a parent."""

POLL_S = 0.002
LIMIT_S = 600
"""Time after which a run that does not do what is awaited counts as hanging."""

SMALL = (
    *("sharder=dim", "cost_model=none", "batch_size=256", "data.max_rows=2000"),
    *("data.num_train_batches=30", "data.num_val_batches=2"),
    *("measure.num_batches=1", "measure.iterations=1", "measure.warmup=1"),
    *("trainer.log_every_steps=5", "trainer.checkpoint.every_s=null"),
)
"""Overrides of a run that starts fast, and passes through its data several times."""


class HangingError(Exception):
    """A run did not do within `LIMIT_S` what was awaited."""


class TrainingRun:
    """A run in a folder, which is started once or more.

    Args:
        folder: folder of the run.
        overrides: of all its starts.
        max_restarts: how often torchrun restarts the ranks by itself.
        is_killed: processes of the run may be killed, so they must not be forks of a server.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        num_ranks: int = 2,
        max_restarts: int = 0,
        is_killed: bool = False,
    ) -> None:
        self.folder = folder
        self._overrides = overrides
        self._num_ranks = num_ranks
        self._max_restarts = max_restarts
        self._is_killed = is_killed
        self._mark = uuid.uuid4().hex
        self._agent: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._output = folder.with_name(f"{folder.name}.output")

    def start(self, *overrides: str) -> None:
        """Start torchrun with further overrides; its output goes beside the folder."""
        command = [
            *("-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(self._num_ranks), "--max-restarts", str(self._max_restarts)),
            *("-m", "dlrm_sharded.train", f"hydra.run.dir={self.folder}"),
            *(*self._overrides, *overrides),
        ]
        with self._output.open("a") as output:
            self._agent = preloaded.start(
                *command, env=self.environment(), stdout=output, own_process=self._is_killed
            )

    def environment(self) -> dict[str, str]:
        """Return the environment of the run's processes."""
        return os.environ | {
            MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "launch"))),
            # torchrun's store would otherwise keep the keys of ranks before a restart.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    @property
    def agent(self) -> subprocess.Popen[str]:
        assert self._agent is not None, "the run is not started"
        return self._agent

    @property
    def has_ended(self) -> bool:
        return self.agent.poll() is not None

    def output(self, offset: int = 0) -> str:
        """Return what all starts have written, from an offset in bytes."""
        with self._output.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")

    def output_bytes(self) -> int:
        return self._output.stat().st_size

    def processes(self) -> dict[int, int | None]:
        """Return the rank of each living process of the run by its pid, None for the agent's."""
        ranks = {pid: environment.get("RANK") for pid, environment in self.environments().items()}
        return {pid: None if rank is None else int(rank) for pid, rank in ranks.items()}

    def environments(self) -> dict[int, dict[str, str]]:
        """Return the environment of each living process of the run by its pid."""
        return {
            int(path.name): environment
            for path in Path("/proc").iterdir()
            if path.name.isdigit() and (environment := _environment(path)).get(MARK) == self._mark
        }

    def ranks(self) -> dict[int, int]:
        """Return the pid of each living rank."""
        return {rank: pid for pid, rank in self.processes().items() if rank is not None}

    def finish(self) -> int:
        """Wait until the run ends, and no process of it is left; return its exit code."""
        until(lambda: self.has_ended and not self.processes(), "the end of the run", poll_s=0.05)
        return self.agent.wait()

    def stop(self) -> None:
        """Kill whatever is left of the run."""
        for pid in self.processes():
            kill(pid, signal.SIGKILL)
        if self._agent is not None:
            self._agent.wait()

    def starts(self) -> list[int]:
        """Return the step at which each start of the run has begun."""
        fields = _json(self.folder / "run.json")
        return [start["step"] for start in fields.get("starts", [])]

    def result(self) -> dict[str, Any]:
        """Return what result.json says; it is empty without one."""
        return _json(self.folder / "result.json")

    def saved_steps(self) -> list[int]:
        """Return the steps with a checkpoint, the newest first."""
        return [int(path.name.removeprefix("step-")) for path in checkpoints(self.folder)]

    def saving_step(self, *, since: float = 0.0) -> int | None:
        """Return the step whose checkpoint is being written, or was when the run was interrupted.

        Args:
            since: time before which the writing has not begun, in s since the epoch.
        """
        for path in (self.folder / FOLDER_NAME).glob(".step-*.partial"):
            try:
                if path.stat().st_mtime > since:
                    return int(path.name.removeprefix(".step-").removesuffix(".partial"))
            except FileNotFoundError:  # it was renamed meanwhile
                continue
        return None

    def last_checkpoint(self) -> Path:
        return checkpoints(self.folder)[0]


def until(condition: Callable[[], bool], awaited: str, *, poll_s: float = POLL_S) -> None:
    """Wait for a condition.

    Raises:
        HangingError: it does not come about.
    """
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise HangingError(f"{awaited} did not come within {LIMIT_S} s")
        time.sleep(poll_s)


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _environment(process: Path) -> dict[str, str]:
    try:
        content = (process / "environ").read_bytes()
    except OSError:  # it has ended, or belongs to another user
        return {}
    return dict(_pairs(content.decode(errors="replace")))


def _pairs(environment: str) -> Iterator[tuple[str, str]]:
    for entry in environment.split("\0"):
        key, equals, value = entry.partition("=")
        if equals:
            yield key, value


def _json(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return fields
