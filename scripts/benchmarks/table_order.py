"""Lookups of a rank's tables in the order that the model gives them, and in drawn ones.

Tables have several widths, and after a narrow one of an odd size the rows of all others straddle
cache lines. Each drawn order is measured as it is, and as the model orders it, in turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np

from benchmarks.figures import interval_text
from benchmarks.measured import NUM_BATCHES, open_bench
from benchmarks.planners import on_device
from dlrm_sharded.datasets.task_sets import MEASURED_RANK_BYTES, measured_tasks
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.measuring import bench as bench_module
from dlrm_sharded.measuring.rank_bench import draw_ids
from dlrm_sharded.model.torchrec_adapter import in_aligned_order
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES
from studies.parts import option
from studies.study import Case, Row

BASIS = "measured"
DRAWN, MODEL = "drawn", "of the model"

OPTIONS = {
    "tasks": option(12, "tasks whose first tables are a rank"),
    "tables": option(10, "most tables of a rank"),
    "orders": option(4, "drawn orders of each rank"),
    "seed": option(0, "of the tasks, ids and orders"),
    "rounds": option(2, "times that each order is measured"),
    "iterations": option(4, "iterations of a measurement"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for number in range(options.tasks):
        yield Case(f"task {number}", functools.partial(_rows, options, number))


def _rows(options: argparse.Namespace, number: int) -> list[Row]:
    with open_bench(options.iterations, table_bytes=MEASURED_RANK_BYTES) as (bench, device):
        task = on_device(measured_tasks(options.seed, num=number + 1)[-1].task, device.type)
        shards = [Shard.whole(table, rank=0) for table in task.tables[: options.tables]]
        sizes = itertools.accumulate(shard.weight_bytes for shard in shards)
        shards = [s for s, size in zip(shards, sizes, strict=True) if size <= MEASURED_RANK_BYTES]
        ids = draw_ids(
            task.tables, batch_size=task.batch_size, num_batches=NUM_BATCHES, seed=options.seed
        )
        rng = np.random.default_rng([options.seed, number])
        orders = [rng.permutation(len(shards)) for _ in range(options.orders)]
        rows: list[Row] = []
        for _ in range(options.rounds):
            for draw, kind in itertools.product(rng.permutation(options.orders), (DRAWN, MODEL)):
                in_order = list if kind == DRAWN else in_aligned_order
                with mock.patch.object(bench_module, "in_aligned_order", in_order):
                    cost = bench.measure([shards[i] for i in orders[draw]], ids)
                times_ms = {stage: cost.stage_ms(stage) for stage in COMPUTE_STAGES}
                rows.append({"number": number, "order": kind, "draw": int(draw)} | times_ms)
    return rows


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write how much faster the model's order is, and how much times depend on the drawn one."""
    del reference
    lines = []
    for name, stages in [*((s, (s,)) for s in COMPUTE_STAGES), ("computation", COMPUTE_STAGES)]:
        ratios: list[float] = []
        spreads: dict[str, list[float]] = {DRAWN: [], MODEL: []}
        for number in dict.fromkeys(row["number"] for row in rows):
            means = {
                kind: _by_draw(
                    [row for row in rows if row["number"] == number and row["order"] == kind],
                    stages,
                )
                for kind in spreads
            }
            ratios.append(means[MODEL].mean() / means[DRAWN].mean())
            for kind, spread in spreads.items():
                spread.append(means[kind].std(ddof=1) / means[kind].mean())
        cells = [float(np.mean(spread)) for spread in spreads.values()]
        lines.append([name.replace("_", " "), interval_text(ratios, ".3f"), min(ratios), *cells])
    titles = (
        *("", "the model's order over drawn ones [95 %]", Column("least", ".3f")),
        *(Column("spread of drawn orders", ".1%"), Column("spread in the model's", ".1%")),
    )
    return TextTable(titles, lines).markdown()


def _by_draw(rows: Sequence[Row], stages: Sequence[str]) -> np.ndarray:
    """Return the mean time of each draw over its rounds."""
    draws: dict[int, list[float]] = {}
    for row in rows:
        draws.setdefault(row["draw"], []).append(sum(row[stage] for stage in stages))
    return np.array([np.mean(times_ms) for times_ms in draws.values()])
