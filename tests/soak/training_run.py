"""A training run of two ranks on this machine that is interrupted, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from dlrm_sharded.checkpoint.folder import FOLDER_NAME, checkpoints
from dlrm_sharded.checkpoint.manifest import check_parts, read_manifest
from dlrm_sharded.checkpoint.restore import load_whole
from tests import preloaded
from tests.preloaded import ROOT

MARK = "DLRM_SHARDED_SOAK_RUN"
"""Environment variable by which the processes of a run are found, also those without a parent."""

LIMIT_S = 600
"""Time after which a run that does not do what is awaited counts as hanging."""

NUM_STEPS = 160
INTERVAL = 20
SETTINGS = (
    *("sharder=dim", "cost_model=none", "batch_size=256", "data.max_rows=2000"),
    *("data.num_train_batches=30", "data.num_val_batches=2", "resume=auto"),
    *("measure.num_batches=1", "measure.iterations=1", "measure.warmup=1"),
    *(f"trainer.num_steps={NUM_STEPS}", "trainer.log_every_steps=5", "trainer.eval_every_steps=50"),
    *(f"trainer.checkpoint.every_steps={INTERVAL}", "trainer.checkpoint.every_s=null"),
)

TRAINING_BEGINS = "embedding cost"
"""Text in the output of a run just before its first step."""

SAME_VALUES = ("train/loss", "eval/auroc", "eval/normalized_entropy")
"""Tags whose values do not depend on time."""

DIFFERENT_TENSORS = (".python", ".step_ms")
"""Ends of the names of tensors that differ between equal runs: other users of Python's random
numbers, and times."""


class TrainingRun:
    """A run in a folder, which is started once or more and restarts killed ranks by itself."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self._overrides = overrides
        self._mark = uuid.uuid4().hex
        self._output = folder.with_name(f"{folder.name}.output")
        self._output.touch()

    def start(self) -> None:
        """Start torchrun; its output goes beside the folder."""
        environment = os.environ | {
            MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "launch"))),
            # torchrun's store would otherwise keep the keys of ranks before a restart.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self._output.open("a") as output:
            self.agent: subprocess.Popen[str] = preloaded.start(
                *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *("--max-restarts", "1000", "-m", "dlrm_sharded.train"),
                *(f"hydra.run.dir={self.folder}", *SETTINGS, *self._overrides),
                env=environment,
                stdout=output,
                own_process=True,
            )

    @property
    def has_ended(self) -> bool:
        return self.agent.poll() is not None

    def output(self, offset: int = 0) -> str:
        """Return what all starts have written, from an offset in bytes."""
        return self._output.read_bytes()[offset:].decode(errors="replace")

    def trains_since(self, offset: int) -> bool:
        """Return whether the output after an offset says that the ranks begin to train."""
        return TRAINING_BEGINS in self.output(offset)

    def logged_step(self, offset: int) -> int:
        """Return the last step of the progress bar after an offset; 0 before its first."""
        steps = re.findall(rf"\b(\d+)/{NUM_STEPS}\b", self.output(offset))
        return int(steps[-1]) if steps else 0

    def output_bytes(self) -> int:
        return self._output.stat().st_size

    def processes(self) -> dict[int, bool]:
        """Return for each living process of the run whether it is a rank, by pid."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to another user
                variables = (path / "environ").read_bytes().split(b"\0")
                if f"{MARK}={self._mark}".encode() in variables:
                    found[int(path.name)] = any(x.startswith(b"RANK=") for x in variables)
        return found

    def finish(self) -> int:
        """Wait until the run ends, and no process of it is left; return its exit code."""
        until(lambda: self.has_ended and not self.processes(), "the end of the run", poll_s=0.05)
        return self.agent.wait()

    def stop(self) -> None:
        """Kill whatever is left of the run."""
        for pid in self.processes():
            kill(pid, signal.SIGKILL)
        self.agent.wait()

    def starts(self) -> list[int]:
        """Return the step at which each start of the run has begun."""
        path = self.folder / "run.json"
        return [x["step"] for x in json.loads(path.read_text())["starts"]] if path.exists() else []

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint; 0 without one."""
        return max((int(x.name.removeprefix("step-")) for x in checkpoints(self.folder)), default=0)

    def saving_step(self, *, since: float = 0.0) -> int | None:
        """Return the step whose checkpoint is being written, or was when the run was interrupted.

        Args:
            since: time before which the writing has not begun, in s since the epoch.
        """
        for path in (self.folder / FOLDER_NAME).glob(".step-*.partial"):
            with suppress(FileNotFoundError):  # it was renamed meanwhile
                if path.stat().st_mtime > since:
                    return int(path.name.removeprefix(".step-").removesuffix(".partial"))
        return None


def differences(mine: TrainingRun, reference: TrainingRun) -> list[str]:
    """Return what two runs have left behind that is not equal, bit for bit."""
    results = [json.loads((run.folder / "result.json").read_text()) for run in (mine, reference)]
    faults = [
        f"{key} in result.json differs: {results}"
        for key in ("steps", "loss", "auroc", "normalized_entropy")
        if results[0][key] != results[1][key]
    ]
    if results[0]["interruptions"] != len(mine.starts()) - 1:
        faults.append(f"{results[0]['interruptions']} interruptions, {len(mine.starts())} starts")
    found, expected = _scalars(mine.folder), _scalars(reference.folder)
    for key in sorted(found.keys() | expected.keys()):
        a, b = found.get(key, []), expected.get(key, [])
        if len(a) != len(b) or (key[0] in SAME_VALUES and a != b):
            faults.append(f"{key[0]} at {key[1]} is {a} instead of {b}")
    before, after = (read_manifest(checkpoints(run.folder)[0]) for run in (reference, mine))
    check_parts(after)
    if before.tensors.keys() != after.tensors.keys():
        return [*faults, "the checkpoints have other tensors"]
    return faults + [
        f"{name} differs"
        for name in before.tensors
        if not name.endswith(DIFFERENT_TENSORS)
        and not torch.equal(load_whole(before, name), load_whole(after, name))
    ]


def _scalars(run_dir: Path) -> dict[tuple[str, int], list[float]]:
    """Return the values of the run's one event file, by tag and step."""
    [path] = run_dir.glob("events.out.tfevents.*")
    found: dict[tuple[str, int], list[float]] = {}
    # The loader that is not legacy makes tensors of scalars.
    for event in LegacyEventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault((value.tag, event.step), []).append(value.simple_value)
    return found


def until(condition: Callable[[], bool], awaited: str, *, poll_s: float = 0.002) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: it does not come about within `LIMIT_S`.
    """
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{awaited} did not come within {LIMIT_S} s")
        time.sleep(poll_s)


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
