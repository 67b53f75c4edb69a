"""The trainer's loop against a bare loop: same wrapped model, same batches, same processes."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.training import Training, dataset_of, new_dlrm
from dlrm_sharded.datasets.presets import embedding_demo
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank, detect_topology
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.training.trainer import TrainerConfig
from studies.on_ranks import Loop, compared_loops, rows_on_ranks
from studies.parts import option
from studies.study import Case, Row

BASIS = "measured"
BATCH_SIZE = 2048


def loop_options(*, steps: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the options of loops that take turns on the ranks of a job."""
    return {
        "ranks": option(2),
        "steps": option(steps, "steps of one loop in one round"),
        "rounds": option(rounds),
    }


OPTIONS = loop_options(steps=140, rounds=6)


def cases(options: argparse.Namespace, module: str = __name__) -> Iterator[Case]:
    run = functools.partial(
        rows_on_ranks, module, options.ranks, steps=options.steps, rounds=options.rounds
    )
    yield Case("loops", run)


def rows_on_rank(rank: Rank, *, steps: int, rounds: int) -> list[Row]:
    topology = detect_topology(memory_gib=4)
    task = ShardingTask(embedding_demo(), topology, BATCH_SIZE)
    dataset = dataset_of(task.tables, BATCH_SIZE, steps)
    plan = GreedySharder("size_lookup").shard(task)
    training = Training.under(
        plan, new_dlrm(task.tables, [64, 16], [64, 1], rank.device), task, rank
    )
    config = TrainerConfig(num_steps=steps, pipeline="base")
    loops: dict[str, Loop] = {
        "bare": lambda: training.train_bare(dataset),
        "trainer": lambda: training.train(dataset, config),
    }
    return compared_loops(loops, rank, steps=steps, rounds=rounds)


def quartiles(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return quartiles and median of the time of each loop over that of the first one."""
    first = np.array(rows[0]["step_ms"])
    return {
        row["loop"]: np.percentile(np.array(row["step_ms"]) / first, [25, 50, 75]).tolist()
        for row in rows[1:]
    }


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write the time of each loop relative to the first one, of whose rounds it is a neighbour."""
    table = TextTable(
        ["loops", *(Column(title, ".4f") for title in ("median", "lower quartile", "upper"))],
        [
            (f"{name} / {rows[0]['loop']}", median, low, high)
            for name, (low, median, high) in quartiles(rows).items()
        ],
    )
    medians = ", ".join(f"{row['loop']} {np.median(row['step_ms']):.2f} ms" for row in rows)
    text = f"{len(rows[0]['step_ms'])} rounds of {rows[0]['steps']} steps; a step: {medians}"
    return f"{text}\n\n{table.markdown()}"
