"""How long a loop stands still beside what writes a checkpoint in a thread of its process.

The loop does what a host does for a GPU: it launches one small operation after another. The
checkpoint of this package is compared with files that the safetensors library makes, each of them
as one object, as earlier versions did; both have parts of 64 MiB. The loop alone takes as long.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import RunState
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.files.json_files import write_durably
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.surroundings import core_wait_s
from studies.on_ranks import rows_on_ranks
from studies.parts import option
from studies.study import Case, Row

BASIS = "measured"
NUM_COLUMNS = 128
NUM_LAUNCHES = 500
"""Operations of an iteration, which takes about a millisecond."""

MOST_READING_S = 2e-4
"""Time in which the clocks are read at once."""

OPTIONS = {
    "rounds": option(3),
    "gib": option(2.0, "size of the checkpoint"),
    "folder": option(str, "decides the disk; by default that of /tmp"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    run = functools.partial(
        rows_on_ranks, __name__, 1, rounds=options.rounds, gib=options.gib, folder=options.folder
    )
    yield Case("stalls", run)


def rows_on_rank(rank: Rank, *, rounds: int, gib: float, folder: str | None) -> list[Row]:
    table = torch.zeros(int(gib * GIB) // (4 * NUM_COLUMNS), NUM_COLUMNS)
    state = {"tables.t.weight": LogicalTensor.whole(table)}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=folder) as run_dir, ThreadPoolExecutor(1) as thread:
        saver = Saver(Path(run_dir), keep=1, background=True, rank=rank)

        def checkpoint(number: int) -> Callable[[], bool]:
            saver.save(state, _run_state(number))
            return lambda: not saver.is_busy

        def library(number: int) -> Callable[[], bool]:
            return thread.submit(_write_objects, Path(run_dir), table).done

        def nothing(number: int) -> Callable[[], bool]:
            ends_at = time.perf_counter() + rows[-1]["seconds"]
            return lambda: time.perf_counter() > ends_at

        writers = {"checkpoint": checkpoint, "library": library, "none": nothing}
        for number in range(rounds + 1):
            for name, write in writers.items():
                started = time.perf_counter()
                is_over = write(number)
                copy_s = time.perf_counter() - started
                row = {"writer": name, "round": number, "copy_s": copy_s}
                rows.append(row | _figures(_iterations_ms(is_over)))
            saver.finish()
        saver.close()
    return [row for row in rows if row["round"]]  # the first round makes the copy's memory


def _iterations_ms(is_over: Callable[[], bool]) -> NDArray[Any]:
    """Return [N, 2]: how long iterations took, and how much of it the thread waited.

    It does not wait for devices or files, only for the interpreter. Time in which other processes
    had its core is left out of the second figure.
    """
    numbers = torch.zeros(64)
    found_s, last = [], _clocks_s()
    while not is_over():
        for _ in range(NUM_LAUNCHES):
            numbers.add_(1.0)
        now = _clocks_s()
        found_s.append(np.subtract(now, last))
        last = now
    return 1e3 * np.array(found_s)


def _clocks_s() -> tuple[float, float]:
    """Return the time, and the time that this thread has waited, both from any beginning."""
    while True:
        before = time.perf_counter()
        had_or_could_have_core_s = time.thread_time() + core_wait_s()
        now = time.perf_counter()
        if now - before < MOST_READING_S:  # the core was not taken away meanwhile
            return now, now - had_or_could_have_core_s


def _figures(iterations_ms: NDArray[Any]) -> Row:
    iteration_ms, wait_ms = iterations_ms.T
    return {
        "num": len(iteration_ms),
        "seconds": float(iteration_ms.sum()) / 1e3,
        "median_ms": float(np.median(iteration_ms)),
        "p999_ms": float(np.percentile(iteration_ms, 99.9)),
        "wait_p999_ms": float(np.percentile(wait_ms, 99.9)),
        "wait_longest_ms": float(wait_ms.max()),
        "wait_s": float(wait_ms.sum()) / 1e3,
    }


def _write_objects(folder: Path, table: Tensor) -> None:
    """Write parts as earlier versions did."""
    for number, block in enumerate(Piece((0, 0), table).blocks()):
        content = save({"block": block.tensor})
        zlib.crc32(content)
        write_durably(folder / f"{number}.safetensors", [content])


def _run_state(step: int) -> RunState:
    return RunState(
        run="stalls",
        step=step,
        batch_size=1,
        seed=0,
        epoch_batches=1,
        world_size=1,
        optimizers={},
        column_bounds={},
        progress={},
        plan={},
        config={},
    )


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write medians over the rounds. Waits are those of iterations for the interpreter."""
    alone = {row["round"]: row for row in rows if row["writer"] == "none"}
    figures: dict[str, Callable[[Row], float]] = {
        "writes, s": lambda row: row["seconds"],
        "copies before, s": lambda row: row["copy_s"],
        "median, ms": lambda row: row["median_ms"],
        "99.9 %, ms": lambda row: row["p999_ms"],
        "above alone, ms": lambda row: row["p999_ms"] - alone[row["round"]]["p999_ms"],
        "waits: 99.9 %, ms": lambda row: row["wait_p999_ms"],
        "longest, ms": lambda row: row["wait_longest_ms"],
        "all, %": lambda row: 100 * row["wait_s"] / row["seconds"],
    }
    lines = []
    for writer in dict.fromkeys(row["writer"] for row in rows):
        of_writer = [row for row in rows if row["writer"] == writer]
        medians = (float(np.median(list(map(of, of_writer)))) for of in figures.values())
        lines.append((writer, *medians))
    table = TextTable(["beside", *(Column(title, ".2f") for title in figures)], lines)
    return f"{len(alone)} rounds; iterations of the first: {rows[0]['num']}\n\n{table.markdown()}"
