"""Train, save and resume a model of 6 GB on two ranks that may use 4 GB each.

Each rank is a host of its own, so that its memory is its own. The limit is that of a memory control
group where one can be made (as root), and else that of a watcher, which kills a rank soon after it
exceeds the limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT_BYTES = 4_000_000_000
NUM_RANKS = 2
POLL_S = 0.02
"""Interval of the watcher. A process that faults in 2 GB/s exceeds its limit by 40 MB in it."""

MODEL = [
    "data=kaggle_synthetic",
    "+data.tables.embedding_dim=44",  # 6 GB of fp32
    "data.num_val_batches=2",
    "topology.memory_gib=3.1",
    "batch_size=2048",
]


@dataclass(frozen=True)
class Phase:
    """A job of all ranks under the limit."""

    name: str
    overrides: list[str]


PHASES = [
    Phase("train and save", ["trainer.num_steps=20"]),
    Phase("resume and save", ["trainer.num_steps=30", "resume=auto"]),
]


class Limit:
    """Ends processes that use more memory than `LIMIT_BYTES`, each for itself."""

    def __init__(self, name: str) -> None:
        self._groups = [_make_group(f"{name}_{rank}") for rank in range(NUM_RANKS)]
        self.peak_bytes = [0] * NUM_RANKS

    @property
    def text(self) -> str:
        if None in self._groups:
            return f"a watcher that looks every {1e3 * POLL_S:.0f} ms"
        return "memory control groups"

    def joiner(self, rank: int) -> Callable[[], None] | None:
        """Return what a rank's process calls before it starts."""
        group = self._groups[rank]
        if group is None:
            return None
        return lambda: _write(group / "cgroup.procs", os.getpid())

    def watch(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        """Return when all ranks have ended; end the others after one that failed."""
        while any(rank.poll() is None for rank in ranks):
            for number, rank in enumerate(ranks):
                used = _peak_bytes(rank.pid)
                self.peak_bytes[number] = max(self.peak_bytes[number], used)
                if (self._groups[number] is None and used > LIMIT_BYTES) or any(
                    other.poll() not in (None, 0) for other in ranks
                ):
                    rank.kill()
            time.sleep(POLL_S)

    def close(self) -> None:
        for group in self._groups:
            if group is not None:
                group.rmdir()


def run_phase(phase: Phase, folder: Path) -> bool:
    """Run the ranks of a phase under the limit, and return whether all succeeded."""
    limit = Limit(f"dlrm_soak_{os.getpid()}")
    port = _free_port()
    ranks = []
    for rank in range(NUM_RANKS):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(NUM_RANKS),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "dlrm_sharded.train", *MODEL, *phase.overrides]
        ranks.append(
            subprocess.Popen(
                [*command, f"hydra.run.dir={folder}"],
                env=environment,
                preexec_fn=limit.joiner(rank),
            )
        )
    try:
        limit.watch(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        limit.close()
    for rank, process in enumerate(ranks):
        ended = (
            "was killed" if process.returncode == -signal.SIGKILL else f"exit {process.returncode}"
        )
        print(
            f"phase {phase.name}: rank {rank} {ended}; peak {limit.peak_bytes[rank] / 1e9:.2f} GB "
            f"of {LIMIT_BYTES / 1e9:.2f} GB, enforced by {limit.text}"
        )
    return all(process.returncode == 0 for process in ranks)


def _make_group(name: str) -> Path | None:
    """Return a memory control group with the limit, version 1 or 2; None where none can be made."""
    root = Path("/sys/fs/cgroup")
    for parent, limit in (
        (root / "memory", "memory.limit_in_bytes"),
        (root, "memory.max"),
    ):
        group = parent / name
        try:
            if not (parent / "cgroup.procs").exists():
                continue
            group.mkdir()
            if (group / limit).exists():
                _write(group / limit, LIMIT_BYTES)
                return group
            group.rmdir()
        except OSError:
            continue
    return None


def _write(path: Path, value: int) -> None:
    path.write_text(str(value))


def _peak_bytes(pid: int) -> int:
    """Return the largest memory use of a process so far; 0 after its end.

    The kernel counts it. `smaps_rollup` would walk the page tables of 4 GB, and block page faults.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, required=True, help="folder of the run, 20 GB")


def run(options: argparse.Namespace) -> int:
    """Run all phases, and return 1 if one fails."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks and removes the groups
    return 0 if all(run_phase(phase, options.folder) for phase in PHASES) else 1
