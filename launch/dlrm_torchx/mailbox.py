"""The files through which a sweep's driver and the ranks of one job communicate.

They are pickles, as in Hydra's launchers, because a task function and its config are Python
objects. The driver and the ranks belong to one user, and the folder belongs to the sweep.
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
from hydra._internal.callbacks import Callbacks
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict, read_write

from dlrm_sharded.commands.own_folder import OwnRunFolder, take_folder
from dlrm_sharded.files.json_files import replace_file

RETURNS, FAILURES = "return_*.pickle", "failure_*.json"

ORDER = "rounds.json"
"""File in the mailbox of an app that runs all jobs of a sweep, in rounds."""


@dataclass(frozen=True, slots=True)
class HydraCall:
    """The function that every rank of a job calls, with its config and the state of Hydra."""

    function: Callable[[Any], Any]
    config: DictConfig
    hydra_context: HydraContext
    singletons: Any

    def run(self, rank: int) -> JobReturn:
        """Make the call as Hydra would; return its result, or raise its error."""
        Singleton.set_state(self.singletons)
        context = self.hydra_context
        if rank > 0:
            context = HydraContext(config_loader=context.config_loader, callbacks=Callbacks())
            with read_write(self.config), open_dict(self.config):
                self.config.hydra.output_subdir = None
        elif any(isinstance(callback, OwnRunFolder) for callback in context.callbacks.callbacks):
            sweep = self.config.hydra.sweep  # Hydra calls on_run_start only for single runs
            take_folder(self.config, Path(sweep.dir) / sweep.subdir)
        job_return = run_job(
            hydra_context=context,
            task_function=self.function,
            config=self.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            configure_logging=rank == 0,
        )
        if job_return.status is JobStatus.FAILED:
            raise job_return._return_value
        return job_return


@dataclass(frozen=True, slots=True)
class JobMailbox:
    """The folder of one job, which the driver and the ranks see under the same path.

    Args:
        attempt: identifies the start of the job to which a rank belongs; empty for the driver, and
            for the ranks of a sweep in rounds.
    """

    folder: Path
    attempt: str = ""

    def send_call(self, call: HydraCall) -> None:
        """Write the call for the ranks, and remove the files of an earlier job."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("*"):
            if stale.is_file():
                stale.unlink()
        # The pickle of a call names modules, so a rank needs the search path before it reads it.
        sent = (str(Path.cwd()), sys.path, cloudpickle.dumps(call))
        replace_file(self.folder / "call.pickle", cloudpickle.dumps(sent))

    def receive_call(self) -> HydraCall:
        """Read the call, after changing to the driver's folder and adding its search path."""
        cwd, search_path, pickled = cloudpickle.loads((self.folder / "call.pickle").read_bytes())
        os.chdir(cwd)
        sys.path += [path for path in search_path if path not in sys.path]
        call: HydraCall = cloudpickle.loads(pickled)
        return call

    def remove_earlier_attempts(self) -> None:
        """Remove files of other attempts, which ranks of this one might not replace."""
        for path in (*self.folder.glob(RETURNS), *self.folder.glob(FAILURES)):
            if not path.stem.endswith(f"_{self.attempt}"):
                path.unlink(missing_ok=True)

    def send_return(self, job_return: JobReturn) -> None:
        replace_file(self.folder / f"return_{self.attempt}.pickle", cloudpickle.dumps(job_return))

    def has_return(self) -> bool:
        return any(self.folder.glob(RETURNS))

    def receive_return(self) -> JobReturn:
        """Read what rank 0 returned; unpickling may raise any error."""
        (path,) = self.folder.glob(RETURNS)
        job_return: JobReturn = cloudpickle.loads(path.read_bytes())
        return job_return

    def send_failure(self, rank: int, reason: str) -> None:
        path = self.folder / f"failure_{rank}_{self.attempt}.json"
        replace_file(path, json.dumps([time.time(), reason]).encode())

    def receive_first_failure(self) -> str | None:
        """Return the reason of the earliest failure, which causes the others; None without any."""
        failures = [json.loads(path.read_text()) for path in self.folder.glob(FAILURES)]
        return min(failures)[1] if failures else None
