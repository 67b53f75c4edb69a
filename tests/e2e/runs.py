"""Starts training runs as a user does, and reads what they leave behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import preloaded

ROOT = Path(__file__).resolve().parents[2]


LAUNCHERS = {
    "ours": ["-m", "dlrm_sharded.ranks.torchrun"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
}


def command(ranks: int, launcher: str = "torchrun") -> list[str]:
    torchrun = [sys.executable, *LAUNCHERS[launcher]]
    return [*torchrun, "--nproc-per-node", str(ranks), "-m", "dlrm_sharded.train"]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(
    folder: Path,
    *overrides: str,
    ranks: int = 2,
    python_path: Path | None = None,
    launcher: str = "torchrun",
) -> subprocess.CompletedProcess[str]:
    run = [*command(ranks, launcher), f"hydra.run.dir={folder}", *overrides]
    env = environment() | ({"PYTHONPATH": str(python_path)} if python_path else {})
    if launcher == "torchrun":
        return preloaded.run(*run[1:], cwd=ROOT, env=env)
    # which of our launcher's ranks ends first is part of what tests see
    return subprocess.run(
        run, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=150
    )


def train_alone(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Without torchrun."""
    arguments = ["-m", "dlrm_sharded.train", f"hydra.run.dir={folder}", *overrides]
    return preloaded.run(*arguments, cwd=ROOT, env=environment())


def result_of(folder: Path) -> dict[str, object]:
    fields: dict[str, object] = json.loads((folder / "result.json").read_text())
    return fields


def events_of(folder: Path) -> EventAccumulator:
    (event_file,) = folder.glob("events.out.tfevents.*")
    events = EventAccumulator(str(event_file))
    events.Reload()
    return events


def kinds_of_files(folder: Path) -> set[str]:
    """First words of their names, but for the claims of owners, which every start leaves."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {p.name.split(".")[0] for p in files if not p.name.startswith(".owner-")}


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(c) for t in tasks for c in (t / "children").read_text().split()]
