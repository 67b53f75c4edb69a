"""Predicted stages of tasks with bags and sequences against measured ones.

Tasks are those of training (`trained_task`), in which a third of the tables become sequences of one
width, and plans put each table anywhere: whole on a rank, or in row blocks on all of them. None of
them is in any fit. On two ranks, in one job, all stages are measured by TorchRec's modules, and the
computation of plans for four ranks rank by rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.figures import interval_text, rows_table
from benchmarks.measured import OPTIMIZER, open_bench
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.drawn_plans import SEQUENCES
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model
from dlrm_sharded.datasets.task_sets import trained_task
from dlrm_sharded.fitting.evaluate import TimePairs
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import detect_hardware, local_hardware
from dlrm_sharded.measuring.bench import Bench
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.measuring.rank_bench import TableIds, draw_ids, median_stages
from dlrm_sharded.model.torchrec_adapter import to_torchrec
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import COMPUTE_STAGES, STAGES, PlanCost
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.distributed import Rank
from studies.on_ranks import rows_on_ranks
from studies.parts import option
from studies.study import Case, Row

BASIS = "measured"
MEASURED_RANKS, SIMULATED_RANKS = 2, 4
NUM_BATCHES = 2
SEQUENCES_SHARE, ROWS_SHARE = 1 / 3, 0.2
"""Fractions of a task's tables that are sequences, and that are in row blocks."""

VECTOR_BYTES = 5e7
"""Largest size of all vectors of a task's sequences."""

OPTIONS = {
    "tasks": option(30, "tasks for each number of ranks"),
    "calibrated": option(str, "artefact of a calibration here, instead of the one that is found"),
    "seed": option(0, "of the tasks, plans and ids"),
    "rounds": option(2, "times that each rank of a simulated plan is measured"),
    "iterations": option(8, "iterations of a measurement"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the job of two ranks, and a case for each task on four."""
    yield Case("2 ranks", functools.partial(_on_ranks, options))
    for number in range(options.tasks):
        yield Case(f"4 ranks, task {number}", functools.partial(_rank_by_rank, options, number))


def mixed_task(number: int, world_size: int, seed: int) -> tuple[ShardingTask, ShardingPlan]:
    """Return a task with bags and sequences, and a random plan of it."""
    topology = Topology(world_size, memory_bytes=GIB, compute_device="cpu")
    task = trained_task(number, topology, seed=seed)
    rng = np.random.default_rng([seed, number, world_size])
    task = with_sequences(task, rng, SEQUENCES_SHARE)
    rows = RowBlocks(range(world_size))
    shards: list[Shard] = []
    for table in task.tables:
        in_rows = rng.random() < ROWS_SHARE and rows.is_possible(table)
        rank = int(rng.integers(world_size))
        shards += rows.shards(table) if in_rows else [Shard.whole(table, rank)]
    return with_profiles(task), ShardingPlan(world_size, tuple(shards))


def with_sequences(task: ShardingTask, rng: np.random.Generator, share: float) -> ShardingTask:
    """Return a task in which a share of the tables are sequences of one width, without profiles."""
    count = max(round(share * len(task.tables)), 1) if share else 0
    chosen = set(rng.choice(len(task.tables), count, replace=False).tolist())
    width = task.tables[min(chosen, default=0)].embedding_dim
    most_ids = VECTOR_BYTES / (4 * width * task.batch_size * max(count, 1))
    sequence: dict[str, Any] = {"embedding_dim": width, "pooled": False, "module": SEQUENCES}
    tables = [dataclasses.replace(table, reuse_histogram=None) for table in task.tables]
    for place in chosen:
        ids = min(tables[place].pooling_factor, most_ids)
        tables[place] = dataclasses.replace(tables[place], pooling_factor=ids, **sequence)
    return dataclasses.replace(task, tables=tuple(tables))


def _on_ranks(options: argparse.Namespace) -> list[Row]:
    keys = ("tasks", "calibrated", "seed", "iterations")
    settings = {key: getattr(options, key) for key in keys}
    return rows_on_ranks(__name__, MEASURED_RANKS, **settings)


def rows_on_rank(
    rank: Rank, *, tasks: int, calibrated: str | None, seed: int, iterations: int
) -> list[Row]:
    """Measure all stages of the tasks' plans on the ranks of this job."""
    torch.set_num_threads(1)
    config = MeasureConfig(iterations=iterations, warmup=2, num_batches=NUM_BATCHES)
    bench = Bench(config, rank.device, optimizer=OPTIMIZER, table_bytes=GIB)
    context = RunContext("cpu", detect_hardware(rank), OPTIMIZER)
    model = learned_cost_model(context, calibrated)
    return [row for number in range(tasks) for row in _rows(rank, bench, model, number, seed)]


def _rows(
    rank: Rank, bench: Bench, model: LearnedCostModel, number: int, seed: int
) -> Iterator[Row]:
    """Yield the times of computation on both ranks, and of exchanges on the slower one."""
    task, plan = mixed_task(number, rank.world_size, seed)
    ids = ids_of(task, seed)
    batches = [ids_of_rank(ids, batch, rank) for batch in range(NUM_BATCHES)]
    torchrec_plan = to_torchrec(plan, task.tables, task.topology)
    measured = bench.measure(task.tables, torchrec_plan, batches).cost
    predicted = model.predict(plan, task)
    rows = [
        {
            "stage": stage,
            "predicted_ms": theirs.stage_ms(stage),
            "measured_ms": ours.stage_ms(stage),
        }
        for theirs, ours in zip(predicted.per_rank, measured.per_rank, strict=True)
        for stage in COMPUTE_STAGES
    ]
    rows += [
        {"stage": stage, "predicted_ms": predicted.stage_max_ms(stage)}
        | {"measured_ms": measured.stage_max_ms(stage)}
        for stage in STAGES
        if stage not in COMPUTE_STAGES
    ]
    for row in rows:
        yield {"number": number, "world_size": rank.world_size} | row


def _rank_by_rank(options: argparse.Namespace, number: int) -> list[Row]:
    task, plan = mixed_task(number, SIMULATED_RANKS, options.seed)
    ids = ids_of(task, options.seed)
    by_rank = plan.shards_by_rank()
    with open_bench(options.iterations, table_bytes=GIB) as (bench, device):
        rounds = bench.measure_rounds(by_rank, ids, rounds=options.rounds)
        context = RunContext(device.type, local_hardware(device), OPTIMIZER)
        predicted: PlanCost = learned_cost_model(context, options.calibrated).predict(plan, task)
    return [
        {"number": number, "world_size": SIMULATED_RANKS, "stage": stage}
        | {"predicted_ms": cost.stage_ms(stage), "measured_ms": measured_ms}
        for cost, shards, of_rank in zip(predicted.per_rank, by_rank, rounds, strict=True)
        if shards
        for stage, measured_ms in median_stages(of_rank).items()
    ]


def ids_of(task: ShardingTask, seed: int) -> TableIds:
    return draw_ids(
        task.tables,
        batch_size=task.batch_size,
        num_batches=NUM_BATCHES,
        seed=seed,
        num_ranks=task.topology.world_size,
    )


def ids_of_rank(ids: TableIds, batch: int, rank: Rank) -> KeyedJaggedTensor:
    """Return the ids of a rank's samples."""
    values, lengths = [], []
    for of_table in ids.batches[batch].values():
        size = len(of_table.lengths) // rank.world_size
        own = of_table.of_rank(rank.rank, rank.world_size)
        values.append(own.values)
        lengths.append(own.lengths[rank.rank * size :][:size])
    return KeyedJaggedTensor(
        keys=[*ids.tables],
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write the errors of each stage by number of ranks."""
    pairs: dict[tuple[int, str], TimePairs] = {}
    for row in rows:
        if row["measured_ms"] > 0:
            found = pairs.setdefault((row["world_size"], row["stage"]), TimePairs())
            found.add(row["predicted_ms"], row["measured_ms"])
    return rows_table(
        [
            {
                "ranks": ranks,
                "stage": stage,
                "bias": interval_text(100 * of.relative_errors, "+.1f"),
            }
            | of.summary()
            for (ranks, stage), of in sorted(pairs.items())
        ],
        {
            "ranks": "{ranks}",
            "stage": "{stage}",
            "times": "{num}",
            "bias, % [95 %]": "{bias}",
            "MAPE, %": "{mape:.1f}",
            "median, %": "{median:.1f}",
            "90 % within, %": "{p90:.1f}",
        },
    )
