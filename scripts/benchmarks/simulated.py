"""Simulated steps beside those of real runs with the same data, model and plan.

Every case is trained on real ranks, and its plan is simulated: each rank's lookups run by
themselves. Runs and simulations take turns, as the machine may be another one a minute later. Real
ranks beyond the cores of this machine share them, which the simulation is told.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import MEDIAN_FACTOR, markdown
from dlrm_sharded.step.parts import PART_LABELS, PARTS
from studies.processes import run_python
from studies.study import Case, Row

BASIS = "simulated"
NUM_STEPS = 30
MEMORY_GIB = 2.0

_KEPT = ("data=synthetic", f"data.num_train_batches={NUM_STEPS}")  # generated ahead
_GENERATED = "++data.cache_batches=0"

CASES: dict[str, tuple[str, ...]] = {
    "demo": (*_KEPT, "batch_size=2048"),
    "demo, batch 8192": (*_KEPT, "batch_size=8192"),
    "criteo": ("data=kaggle_synthetic", "data.max_rows=200000", "batch_size=4096", _GENERATED),
    "mlperf tables": ("data=mlperf_dcnv2", "data.max_rows=100000", "batch_size=1024", _GENERATED),
}
"""Overrides of the data and the batch, of the run and of its simulation.

Either all batches are kept in memory or none: which ones a short run finds there depends on its
order of the batches, and on which of them its prediction has read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sharders", nargs="+", default=["neuroshard", "random"])
    parser.add_argument("--rounds", type=int, default=3, help="runs and simulations of each case")


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for num_ranks in options.ranks:
        for case in options.cases:
            for sharder in options.sharders:
                run = functools.partial(_rows, case, sharder, num_ranks, rounds=options.rounds)
                yield Case(f"{num_ranks} ranks, {case}, {sharder}", run)


def _rows(case: str, sharder: str, num_ranks: int, *, rounds: int) -> list[Row]:
    """Train and simulate a case in turns; return the figures of every round."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        compared = _Compared(Path(folder), CASES[case], num_ranks, sharder)
        turns = [(compared.trained(i), compared.simulated(i)) for i in range(rounds)]
    row: Row = {
        "case": case,
        "sharder": sharder,
        "ranks": num_ranks,
        "real_ms": [real["step_ms"] for real, _ in turns],
        "simulated_ms": [simulated["step_ms"] for _, simulated in turns],
        "predicted_ms": [real["predicted_step_ms"] for real, _ in turns],
        "simulated_parts_ms": _medians([simulated["parts_ms"] for _, simulated in turns]),
        "predicted_parts_ms": _medians([real["predicted_parts_ms"] for real, _ in turns]),
        "load": load,
    }
    print(
        f"{num_ranks} ranks, {case}, {sharder}: real {np.median(row['real_ms']):.1f} ms, "
        f"simulated {np.median(row['simulated_ms']):.1f} ms",
        flush=True,
    )
    return [row]


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: float(np.median([parts[part] for parts in rounds])) for part in PARTS}


@dataclass(frozen=True, slots=True)
class _Compared:
    """A case in a folder, with its runs and its simulations, all of the first run's plan."""

    folder: Path
    overrides: Sequence[str]
    num_ranks: int
    sharder: str

    def trained(self, number: int) -> dict[str, Any]:
        """Return the result of a run on real ranks."""
        out = self.folder / f"run-{number}"
        sharder = ["plan_file", f"sharder.path={self._plan}"] if number else [self.sharder]
        run_python(
            *("-m", "dlrm_sharded.ranks.torchrun", "--nproc-per-node", str(self.num_ranks)),
            *("-m", "dlrm_sharded.train", *self.overrides, f"sharder={sharder[0]}", *sharder[1:]),
            *(f"topology.memory_gib={MEMORY_GIB}", f"trainer.num_steps={NUM_STEPS}"),
            *("trainer.num_eval_batches=0", "trainer.checkpoint.every_s=null", "journal=none"),
            f"hydra.run.dir={out}",
        )
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return result

    def simulated(self, number: int) -> dict[str, Any]:
        """Return the simulation of the same plan."""
        out = self.folder / f"simulation-{number}"
        cores = min(self.num_ranks, len(os.sched_getaffinity(0)))
        run_python(
            *(
                "-m",
                "dlrm_sharded.commands.simulate",
                *self.overrides,
                f"topology.world_size={self.num_ranks}",
            ),
            f"topology.memory_gib={MEMORY_GIB}",
            *(f"host_cores={cores}", "journal=none"),
            *(f"sharder=plan_file;path={self._plan}", f"out={out}"),
        )
        found = json.loads((out / "simulation.json").read_text())
        sharder: dict[str, Any] = found["sharders"][0]
        return sharder

    @property
    def _plan(self) -> Path:
        return self.folder / "run-0" / "plan.json"


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write the errors of the simulations by number of ranks, and the parts of every step."""
    sizes = sorted({row["ranks"] for row in rows})
    errors = markdown(HEADER, [_errors(size, rows) for size in sizes])
    return f"{errors}\n\n{markdown(['mean of all ranks, ms', *PARTS_HEADER], list(_parts(rows)))}"


HEADER = (
    "ranks",
    "cases",
    "simulated: mean error, %",
    "bias, %",
    "predicted: mean error, %",
    "bias, %",
    "standard error of a real step, %",
)
PARTS_HEADER = ("step", *(PART_LABELS[part] for part in PARTS))


def _errors(num_ranks: int, rows: Sequence[Row]) -> list[object]:
    of_size = [row for row in rows if row["ranks"] == num_ranks]
    cells: list[object] = [num_ranks, len(of_size)]
    for key in ("simulated_ms", "predicted_ms"):
        logs = np.array(
            [np.log(np.median(row[key]) / np.median(row["real_ms"])) for row in of_size]
        )
        cells += [
            f"{100 * np.expm1(np.abs(logs).mean()):.1f}",
            f"{100 * np.expm1(logs.mean()):+z.1f}",
        ]
    return [*cells, f"{100 * np.mean([_noise(row['real_ms']) for row in of_size]):.1f}"]


def _noise(rounds: Sequence[float]) -> float:
    """Return the relative standard error of the median of some rounds; infinite for one."""
    if len(rounds) < 2:
        return float("inf")
    return MEDIAN_FACTOR * float(np.log(rounds).std(ddof=1)) / len(rounds) ** 0.5


def _parts(rows: Sequence[Row]) -> Iterator[list[object]]:
    """Yield the steps of every case: the real one, of which only the whole is known, and others."""
    for row in rows:
        name = f"{row['ranks']} ranks, {row['case']}, {row['sharder']}"
        yield [f"{name}: real", f"{np.median(row['real_ms']):.1f}", *("" for _ in PARTS)]
        for kind in ("simulated", "predicted"):
            parts = (f"{row[f'{kind}_parts_ms'][part]:.1f}" for part in PARTS)
            yield [f"{name}: {kind}", f"{np.median(row[f'{kind}_ms']):.1f}", *parts]
