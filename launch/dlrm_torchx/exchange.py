"""The files by which a sweep's driver and the ranks of one job speak to each other.

They are pickles, as Hydra's launchers use: a task function and its config are Python objects. The
driver and the ranks are one user's, and the folder is the sweep's own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig

from dlrm_sharded.json_files import replace_file

RETURNS = "return_*.pickle"
FAILURES = "failure_*.json"


@dataclass(frozen=True, slots=True)
class Task:
    """What every rank of a job does."""

    function: Callable[[Any], Any]
    config: DictConfig
    hydra_context: HydraContext
    singletons: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended, in its own words."""

    rank: int
    reason: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """One job's folder; the ranks must see it under the same path.

    Args:
        attempt: which start of the job a rank belongs to; the driver reads whatever is there.
    """

    folder: Path
    attempt: str = ""

    def send_task(self, task: Task) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("*"):
            if stale.is_file():
                stale.unlink()
        # Where to look for modules must be known before the pickle that names them is read.
        surroundings = {"cwd": str(Path.cwd()), "sys_path": sys.path}
        (self.folder / "surroundings.json").write_text(json.dumps(surroundings))
        (self.folder / "task.pickle").write_bytes(cloudpickle.dumps(task))

    def receive_task(self) -> Task:
        """Also goes to the driver's folder, and looks for modules where the driver does."""
        surroundings = json.loads((self.folder / "surroundings.json").read_text())
        os.chdir(surroundings["cwd"])
        sys.path += [path for path in surroundings["sys_path"] if path not in sys.path]
        task: Task = cloudpickle.loads((self.folder / "task.pickle").read_bytes())
        return task

    def forget_earlier(self) -> None:
        """What all ranks said in other attempts: some may end in this one before they get here."""
        for path in (*self.folder.glob(RETURNS), *self.folder.glob(FAILURES)):
            if not path.stem.endswith(f"_{self.attempt}"):
                path.unlink(missing_ok=True)

    def send_return(self, job_return: JobReturn) -> None:
        path = self.folder / f"return_{self.attempt}.pickle"
        replace_file(path, cloudpickle.dumps(job_return))

    def has_return(self) -> bool:
        return any(self.folder.glob(RETURNS))

    def receive_return(self) -> JobReturn:
        """Raises whatever unpickling does."""
        (path,) = self.folder.glob(RETURNS)
        job_return: JobReturn = cloudpickle.loads(path.read_bytes())
        return job_return

    def send_failure(self, rank: int, reason: str) -> None:
        fields = {"rank": rank, "reason": reason, "time_s": time.time()}
        path = self.folder / f"failure_{rank}_{self.attempt}.json"
        replace_file(path, json.dumps(fields).encode())

    def receive_failure(self) -> Failure | None:
        """The first one: the others fail because a rank is gone."""
        paths = self.folder.glob(FAILURES)
        failures = [Failure(**json.loads(path.read_text())) for path in paths]
        return min(failures, key=lambda failure: failure.time_s, default=None)
