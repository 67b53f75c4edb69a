"""Rows/s at which an invented Criteo TSV is converted, and at which its batches are served."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import rows_table
from studies.parts import option
from studies.study import Case, Row

if TYPE_CHECKING:
    from dlrm_sharded.datasets.base import Dataset

BASIS = "measured"
SERVE_S = 2.0


OPTIONS = {
    "rows": option(400_000),
    "batch_size": option(2048),
    "threads": option(1, "threads that parse"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    yield Case("criteo", functools.partial(_rows, options))


def report(rows: Sequence[Row], reference: str | None) -> str:
    columns = {"work": "{work}", "rows/s": "{rows_per_s:,.0f}", "per core (CPU time)": "{per_core}"}
    return rows_table(rows, columns)


def _rows(options: argparse.Namespace) -> list[Row]:
    os.environ["POLARS_MAX_THREADS"] = str(options.threads)  # read when polars is imported
    import torch

    from dlrm_sharded.datasets.criteo import CriteoDataset, CriteoSource, convert
    from dlrm_sharded.datasets.criteo_sample import write_criteo_sample

    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_criteo_sample(folder / "small.tsv", num_rows=20_000)
        write_criteo_sample(folder / "large.tsv", num_rows=options.rows)
        convert(CriteoSource(str(folder / "small.tsv")), folder / "warm_up")
        for id_mapping in ("vocabulary", "hash"):
            source = CriteoSource(
                str(folder / "large.tsv"),
                id_mapping=id_mapping,
                max_ind_range=None if id_mapping == "vocabulary" else 1_000_000,
                block_rows=options.batch_size,
            )
            wall_s, cpu_s = _timed(functools.partial(convert, source, folder / id_mapping))
            work = f"convert {id_mapping}, {options.threads} polars threads"
            rates = {
                "rows_per_s": options.rows / wall_s,
                "per_core": f"{options.rows / cpu_s:,.0f}",
            }
            rows.append({"work": work, **rates})
        for case, batch_size, world_size in (
            ("batch = block", options.batch_size, 1),
            ("batch = 4 blocks, 1 of 4 ranks", options.batch_size * 4, 4),
            ("batch = 1.5 blocks", options.batch_size * 3 // 2, 1),
            ("batch = 1/4 block", options.batch_size // 4, 1),
        ):
            dataset = CriteoDataset(folder / "vocabulary", batch_size=batch_size, embedding_dim=16)
            rate = _served_rows_per_s(dataset, world_size)
            rows.append({"work": f"serve, {case}", "rows_per_s": rate, "per_core": "-"})
    return rows


def _served_rows_per_s(dataset: Dataset, world_size: int) -> float:
    """Return the median rows/s of one rank over single batches."""
    step_s = []
    local_batch_size = dataset.batch_size // world_size
    stop = time.perf_counter() + SERVE_S
    for index in itertools.cycle(range(dataset.num_batches("train"))):
        start = time.perf_counter()
        dataset.batch("train", index, rank=0, world_size=world_size)
        end = time.perf_counter()
        step_s.append(end - start)
        if end > stop:
            return local_batch_size / statistics.median(step_s)
    return 0.0


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Return the wall time and the CPU time of the work, in s."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu
