"""Starts training runs as a user does, and reads what they leave behind."""

import json
import os
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import preloaded
from tests.preloaded import ROOT as ROOT

LAUNCHERS = {
    "ours": ["-m", "dlrm_sharded.ranks.torchrun", "--nproc-per-node"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
}


def command(ranks: int, launcher: str = "torchrun") -> list[str]:
    """Return the arguments of Python that train with so many ranks."""
    return [*LAUNCHERS[launcher], str(ranks), "-m", "dlrm_sharded.train"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(
    folder: Path,
    *overrides: str,
    ranks: int = 2,
    python_path: Path | None = None,
    launcher: str = "torchrun",
    exit_code: int = 0,
) -> preloaded.Ended:
    env = environment() | ({"PYTHONPATH": str(python_path)} if python_path else {})
    run = [*command(ranks, launcher), f"hydra.run.dir={folder}", *overrides]
    return preloaded.run(*run, env=env, exit_code=exit_code)


def train_alone(folder: Path, *overrides: str, exit_code: int = 0) -> preloaded.Ended:
    """Without torchrun."""
    arguments = ["-m", "dlrm_sharded.train", f"hydra.run.dir={folder}", *overrides]
    return preloaded.run(*arguments, env=environment(), exit_code=exit_code)


def script(name: str, folder: Path, *overrides: str, exit_code: int = 0) -> preloaded.Ended:
    """Run the command of this name in a folder."""
    module = f"dlrm_sharded.commands.{name}"
    return preloaded.run("-m", module, *overrides, cwd=folder, exit_code=exit_code)


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def events_of(folder: Path) -> EventAccumulator:
    (event_file,) = folder.glob("events.out.tfevents.*")
    events = EventAccumulator(str(event_file))
    events.Reload()
    return events


def kinds_of_files(folder: Path) -> set[str]:
    """First words of their names, but for the claims of owners, which every start leaves."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {p.name.split(".")[0] for p in files if not p.name.startswith(".owner")}
