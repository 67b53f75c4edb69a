"""Lookups of single ranks: MLPerf's plans for 8 ranks, and what decides the time of a lookup.

Each part is a question about GPUs that the cost model has to answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.measured import cost_model_file, open_bench, task_rows
from benchmarks.planners import on_device, planners_of
from dlrm_sharded.accesses.patterns import ZipfAccesses
from dlrm_sharded.datasets.presets import mlperf_dcnv2
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.measuring.rank_bench import RankBench, draw_ids
from dlrm_sharded.measuring.stage_clock import StageClock
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.plan_cost import (
    COMPUTE_STAGES,
    EXCHANGE_STAGES,
    FWD_COMPUTE,
    STAGES,
    PlanCost,
    StageCost,
)
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from studies.study import Row, StudyRun

SHARDERS = ("neuroshard", "torchrec")
NVLINK_BYTES_PER_S = 450e9
"""Bandwidth of an H100 or H200 to the GPUs of its host, in one direction, as its maker states it.
One GPU cannot measure it."""

ITERATIONS, SMALL_ITERATIONS = 12, 3
PART_S = 30
"""Time of a part on a GPU."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the parts.

    Args:
        max_rows: rows to which MLPerf's tables are cut.
        memory_bytes: memory of a rank.
        batch_sizes: from those of a rank in a small job to a large global one.
        num_rows: rows of the tables whose widths or batch sizes vary.
        table_bytes: sizes of the table that grows beyond the reach of the GPU's page tables.
    """

    max_rows: int
    memory_bytes: int
    batch_sizes: tuple[int, ...]
    num_rows: int
    table_bytes: tuple[int, ...]


ALL_ROWS = 2**40
BATCH_SIZES = (128, 512, 1024, 4096, 8192, 16_384, 65_536)
FULL = Sizes(ALL_ROWS, 60 * GIB, BATCH_SIZES, 1_000_000, (2 * GIB, 8 * GIB, 24 * GIB, 60 * GIB))
SMALL = Sizes(1000, GIB // 32, (64, 128), 1000, (2**20, 2**22))


def run(study: StudyRun) -> None:
    device = study.device()
    sizes, iterations = (SMALL, SMALL_ITERATIONS) if study.small else (FULL, ITERATIONS)
    if device.type == "cuda":
        half = torch.cuda.mem_get_info(device)[0] // 2
        sizes = dataclasses.replace(
            sizes,
            memory_bytes=min(sizes.memory_bytes, half),
            table_bytes=tuple(size for size in sizes.table_bytes if size <= half),
        )
    with open_bench(iterations, table_bytes=sizes.memory_bytes) as (bench, _):
        parts: dict[str, Callable[[], Any]] = {
            "launches": lambda: launches(bench, sizes, device),
            "widths": lambda: widths(bench, sizes),
            "batch_sizes": lambda: by_batch_size(bench, sizes),
            "table_sizes": lambda: by_table_size(bench, sizes),
            "mlperf": lambda: mlperf(bench, sizes, device),
        }
        for name, figures in study.each(parts, seconds=2 if study.small else PART_S):
            study.show(**HEADLINES[name](figures))


def mlperf(bench: RankBench, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Measure the plans of MLPerf's tables for 8 ranks of one host; exchanges are predicted."""
    tables = tuple(
        dataclasses.replace(table, num_embeddings=min(table.num_embeddings, sizes.max_rows))
        for table in mlperf_dcnv2()
    )
    topology = Topology(
        8,
        sizes.memory_bytes,
        local_world_size=8,
        optimizer_bytes_per_row=4,
        intra_host_bytes_per_s=NVLINK_BYTES_PER_S,
    )
    task = on_device(ShardingTask(tables, topology, max(sizes.batch_sizes)), device.type)
    planners = planners_of(SHARDERS, device=device.type, hardware=local_hardware(device))
    rows = task_rows(0, task, planners, bench, np.random.default_rng(0), rounds=1)
    return {row["sharder"]: _plan_figures(row) for row in rows} | {
        "cost_model": cost_model_file(device)
    }


def _plan_figures(row: Row) -> dict[str, Any]:
    if "measured" not in row:
        return {"error": "the sharder found no plan"}
    measured, predicted = (PlanCost.from_json(row[key]) for key in ("measured", "predicted"))
    return {
        "slowest_rank_ms": row["compute_ms"],
        "predicted_slowest_rank_ms": row["predicted_compute_ms"],
        "by_rank_ms": [cost.computation_ms for cost in measured.per_rank],
        "predicted_by_rank_ms": [cost.computation_ms for cost in predicted.per_rank],
        **{f"{stage}_ms": measured.stage_max_ms(stage) for stage in COMPUTE_STAGES},
        "predicted_comm_ms": [predicted.stage_max_ms(stage) for stage in EXCHANGE_STAGES],
        "plan": row["plan"],
    }


def launches(bench: RankBench, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Time the stages behind a sleep of the GPU, and without it, where they contain launches."""
    found: dict[str, Any] = {}
    for batch_size in (min(sizes.batch_sizes), 8 * min(sizes.batch_sizes), max(sizes.batch_sizes)):
        tables = _tables(8, sizes.num_rows, width=64)
        ids = draw_ids(tables, batch_size=batch_size, num_batches=2, seed=0)
        behind_sleep = bench.measure_all(_whole(tables), ids)
        with _without_sleep():
            without = bench.measure_all(_whole(tables), ids)
        found[f"batch {batch_size}"] = {
            "behind_sleep_ms": _times_ms(behind_sleep.cost.per_rank[0], STAGES),
            "without_sleep_ms": _times_ms(without.cost.per_rank[0], STAGES),
            "launch_ms": dict(behind_sleep.launch_ms),
            "exposed": list(behind_sleep.exposed),
            "spread": behind_sleep.spread,
        }
    if device.type == "cpu":
        found["note"] = "a CPU launches nothing: both times are the same quantity"
    return found


@contextmanager
def _without_sleep() -> Iterator[None]:
    """Let all stages be timed as those in which the host waits."""
    timed = StageClock.timed

    def timed_with_host(clock: StageClock, name: str, work: Any, *, waits: bool = False) -> Any:
        return timed(clock, name, work, waits=True)

    with mock.patch.object(StageClock, "timed", timed_with_host):
        yield


def widths(bench: RankBench, sizes: Sizes) -> dict[str, Any]:
    """Measure four tables of 16 columns, alone and in one launch with a table of 128.

    FBGEMM gives every table of a launch the threads that the widest one needs.
    """
    narrow = _tables(4, sizes.num_rows, width=16, prefix="narrow")
    wide = _tables(1, sizes.num_rows, width=128, prefix="wide")
    ids = draw_ids([*narrow, *wide], batch_size=max(sizes.batch_sizes), num_batches=2, seed=0)
    alone = bench.measure(_whole(narrow), ids)
    wide_alone = bench.measure(_whole(wide), ids)
    together = bench.measure(_whole([*narrow, *wide]), ids)
    beside = {
        stage: together.stage_ms(stage) - wide_alone.stage_ms(stage) for stage in COMPUTE_STAGES
    }
    return {
        "16_alone": _times_ms(alone),
        "128_alone": _times_ms(wide_alone),
        "together": _times_ms(together),
        "16_beside_128_over_alone": {
            stage: beside[stage] / alone.stage_ms(stage) for stage in beside
        },
    }


def by_batch_size(bench: RankBench, sizes: Sizes) -> list[dict[str, Any]]:
    """Measure the same tables at several batch sizes; a small batch measures launches."""
    tables = _tables(8, sizes.num_rows, width=128)
    return [
        {"batch_size": batch_size, **_per_id(bench, tables, batch_size, exponent=0.9)}
        for batch_size in sizes.batch_sizes
    ]


def by_table_size(bench: RankBench, sizes: Sizes) -> list[dict[str, Any]]:
    """Measure uniform ids in one table of several sizes; beyond some GiB, addresses miss too."""
    found = []
    for table_bytes in sizes.table_bytes:
        tables = _tables(1, table_bytes // (4 * 128), width=128, pooling_factor=32.0)
        figures = _per_id(bench, tables, max(sizes.batch_sizes), exponent=0.0)
        found.append({"table_gib": table_bytes / GIB, **figures})
    return found


def _per_id(
    bench: RankBench, tables: Sequence[Table], batch_size: int, *, exponent: float
) -> dict[str, float]:
    accesses = {table.name: ZipfAccesses(exponent) for table in tables}
    ids = draw_ids(tables, batch_size=batch_size, num_batches=2, seed=0, accesses=accesses)
    cost = bench.measure(_whole(tables), ids)
    num_ids = sum(len(of_table.values) for of_table in ids.batches[0].values())
    return {
        **{f"{stage}_ms": cost.stage_ms(stage) for stage in COMPUTE_STAGES},
        **{f"{stage}_ns_per_id": 1e6 * cost.stage_ms(stage) / num_ids for stage in COMPUTE_STAGES},
    }


def _tables(
    count: int, num_rows: int, *, width: int, prefix: str = "table", pooling_factor: float = 10.0
) -> list[Table]:
    return [Table(f"{prefix}{i}", num_rows, width, pooling_factor) for i in range(count)]


def _whole(tables: Sequence[Table]) -> list[Shard]:
    return [Shard.whole(table, rank=0) for table in tables]


def _times_ms(cost: StageCost, stages: Sequence[str] = COMPUTE_STAGES) -> dict[str, float]:
    return {stage: cost.stage_ms(stage) for stage in stages}


def _of_launches(figures: dict[str, Any]) -> dict[str, str]:
    first = next(iter(figures.values()))
    times = (first[key][FWD_COMPUTE] for key in ("behind_sleep_ms", "without_sleep_ms"))
    return {"small_lookup_without_and_with_launches": " and ".join(f"{ms:.3f} ms" for ms in times)}


def _of_widths(figures: dict[str, Any]) -> dict[str, str]:
    ratios = figures["16_beside_128_over_alone"]
    return {"16_beside_128": ", ".join(f"{ratio:.2f} x" for ratio in ratios.values())}


def _of_sizes(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    first, last = (rows[i]["fwd_compute_ns_per_id"] for i in (0, -1))
    return {name: f"{first:.2f} to {last:.2f} ns an id"}


def _of_mlperf(figures: dict[str, Any]) -> dict[str, str]:
    found = {name: figures[name].get("slowest_rank_ms") for name in SHARDERS}
    return {name: f"{ms:.2f} ms" for name, ms in found.items() if ms is not None}


HEADLINES: dict[str, Callable[[Any], dict[str, str]]] = {
    "launches": _of_launches,
    "widths": _of_widths,
    "batch_sizes": lambda rows: _of_sizes("batch_sizes", rows),
    "table_sizes": lambda rows: _of_sizes("table_sizes", rows),
    "mlperf": _of_mlperf,
}
