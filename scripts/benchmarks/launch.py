"""What TorchX and Hydra add: to one run over plain torchrun, and to a sweep over its jobs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["trainer.num_steps=10", "data.max_rows=500", "batch_size=256"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7, help="of a short run, three ways")


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        compare(options.ranks, options.rounds, Path(folder))
        sweep(options.ranks, Path(folder) / "sweep")


def compare(ranks: int, rounds: int, folder: Path) -> None:
    """One short run by torchrun, by `torchx run` and as a sweep of one, in turn."""
    python = [sys.executable, "-m"]
    torchx = str(Path(sys.executable).with_name("torchx"))
    seconds: dict[str, list[float]] = {}
    for i in range(rounds):
        commands = {
            "torchrun": [
                *(*python, "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
                *("-m", "dlrm_sharded.train", f"hydra.run.dir={folder}/torchrun_{i}", *SHORT),
            ],
            "torchx run": [
                *(torchx, "run", "-s", "local_cwd", "launch/component.py:train", "-j"),
                *(f"1x{ranks}", f"hydra.run.dir={folder}/torchx_{i}", *SHORT),
            ],
            "sweep of one": [
                *(*python, "dlrm_sharded.train", "-m", f"hydra.sweep.dir={folder}/sweep_{i}"),
                *(f"hydra.launcher.j=1x{ranks}", *SHORT),
            ],
        }
        for name in list(commands) if i % 2 else reversed(commands):
            seconds.setdefault(name, []).append(timed(commands[name]))
    plain = seconds["torchrun"]
    for name in ("torchx run", "sweep of one"):
        low, median, high = np.percentile(np.subtract(seconds[name], plain), [25, 50, 75])
        print(
            f"{name}: {np.median(seconds[name]):.2f} s, torchrun {np.median(plain):.2f} s; "
            f"more by {median:.2f} s (quartiles {low:.2f} to {high:.2f}, {rounds} rounds)",
            flush=True,
        )


def sweep(ranks: int, sweep_dir: Path) -> None:
    """All sharders on the default task; the driver's seconds beside those of its jobs."""
    total = timed(
        [
            *(sys.executable, "-m", "dlrm_sharded.train", "-m", f"hydra.sweep.dir={sweep_dir}"),
            *("sharder=glob(*,exclude=plan_file)", f"hydra.launcher.j=1x{ranks}"),
        ]
    )
    jobs = json.loads((sweep_dir / "sweep.json").read_text())["jobs"]
    of_jobs = sum(job["seconds"] for job in jobs)
    print(
        f"sweep of {len(jobs)} sharders: {total:.1f} s, its jobs {of_jobs:.1f} s; "
        f"more by {total - of_jobs:.1f} s ({100 * (total / of_jobs - 1):.1f} %)"
    )


def timed(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(
        command,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        check=True,
    )
    return time.perf_counter() - started
