"""Simulated steps beside those of real runs with the same data, model and plan.

Every case is trained on real ranks, and then simulated from its plan: each rank's lookups run by
themselves. Real ranks beyond the cores of this machine share them, which the simulation is told.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compared import markdown

SIMULATE = Path(__file__).parents[1] / "simulate.py"
NUM_STEPS = 30
MEMORY_GIB = 2.0

CASES: dict[str, tuple[str, ...]] = {
    "demo": ("data=synthetic", "batch_size=2048"),
    "demo, batch 8192": ("data=synthetic", "batch_size=8192"),
    "criteo": ("data=kaggle_synthetic", "data.max_rows=200000", "batch_size=4096"),
    "mlperf tables": ("data=mlperf_dcnv2", "data.max_rows=100000", "batch_size=1024"),
}
"""Overrides of the data and the batch, of the run and of its simulation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sharders", nargs="+", default=["neuroshard", "random"])
    parser.add_argument("--jsonl", type=Path, help="file that gets a line for each case")


def run(options: argparse.Namespace) -> None:
    rows = []
    for row in _rows(options):
        rows.append(row)
        if options.jsonl:
            with options.jsonl.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(
            f"{row['ranks']} ranks, {row['case']}, {row['sharder']}: real {row['real_ms']:.1f} ms, "
            f"simulated {row['simulated_ms']:.1f} ms",
            flush=True,
        )
    report(rows)


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for num_ranks in options.ranks:
        for case in options.cases:
            for sharder in options.sharders:
                yield _row(case, sharder, num_ranks)


def _row(case: str, sharder: str, num_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        compared = _Compared(Path(folder), CASES[case], num_ranks)
        load = os.getloadavg()[0]
        first = compared.trained(sharder, "before")
        simulated = compared.simulated("before")
        again = compared.trained(sharder, "after")  # the machine may be another one by now
    real_ms = math.sqrt(first["step_ms"] * again["step_ms"])
    return {
        "case": case,
        "sharder": sharder,
        "ranks": num_ranks,
        "real_ms": real_ms,
        "simulated_ms": simulated["step_ms"],
        "predicted_ms": first["predicted_step_ms"],
        "noise": abs(math.log(first["step_ms"] / again["step_ms"])) / 2,
        "load": load,
    }


@dataclass(frozen=True, slots=True)
class _Compared:
    """A case in a folder, with its runs and its simulation."""

    folder: Path
    overrides: Sequence[str]
    num_ranks: int

    def trained(self, sharder: str, name: str) -> dict[str, Any]:
        """Return the result of a run on real ranks."""
        _call(
            *("-m", "dlrm_sharded.torchrun", "--nproc-per-node", str(self.num_ranks)),
            *("-m", "dlrm_sharded.train", *self.overrides, f"sharder={sharder}"),
            *(f"topology.memory_gib={MEMORY_GIB}", f"trainer.num_steps={NUM_STEPS}"),
            *("trainer.num_eval_batches=0", "trainer.checkpoint.every_s=null", "journal=none"),
            f"hydra.run.dir={self.folder / name}",
        )
        result: dict[str, Any] = json.loads((self.folder / name / "result.json").read_text())
        return result

    def simulated(self, name: str) -> dict[str, Any]:
        """Return the simulation of the plan of a run."""
        cores = min(self.num_ranks, len(os.sched_getaffinity(0)))
        _call(
            *(str(SIMULATE), *self.overrides, f"topology.world_size={self.num_ranks}"),
            f"topology.memory_gib={MEMORY_GIB}",
            *(f"host_cores={cores}", "journal=none"),
            f"sharder=plan_file;path={self.folder / name / 'plan.json'}",
            f"out={self.folder / 'simulation'}",
        )
        found = json.loads((self.folder / "simulation" / "simulation.json").read_text())
        sharder: dict[str, Any] = found["sharders"][0]
        return sharder


def _call(*arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr.decode()[-2000:]}")


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print the errors of the simulations by number of ranks."""
    lines = []
    for num_ranks in sorted({row["ranks"] for row in rows}):
        of_size = [row for row in rows if row["ranks"] == num_ranks]
        cells: list[object] = [num_ranks, len(of_size)]
        for key in ("simulated_ms", "predicted_ms"):
            logs = np.array([math.log(row[key] / row["real_ms"]) for row in of_size])
            cells += [
                f"{100 * math.expm1(np.abs(logs).mean()):.1f}",
                f"{100 * math.expm1(logs.mean()):+z.1f}",
            ]
        cells.append(f"{100 * np.mean([row['noise'] for row in of_size]):.1f}")
        lines.append(cells)
    header = ["ranks", "cases", "simulated: mean error, %", "bias, %"]
    header += ["predicted: mean error, %", "bias, %", "two runs differ by +-, %"]
    print(f"\n{markdown(header, lines)}")
