"""Steps of models with bags, sequences or both, under plans of several sharders.

A step is that of the tables: forward and backward passes of all modules and the fused update. Dense
layers take as long under every plan, and are left out. On two ranks, all plans of a task train in
one job and in turns. Those for four ranks have measured computation, rank by rank, and predicted
exchanges, as in `measured`. Half of the tasks are drawn as those of training; the others have few
rows, wide vectors and long histories, so that exchanges take most of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import figures
from benchmarks.measured import OPTIMIZER, open_bench, task_rows
from benchmarks.planners import SHARDERS_TEXT, planner_of
from benchmarks.sequences import NUM_BATCHES, ids_of, ids_of_rank, with_sequences
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.datasets.task_sets import trained_task
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.files.text_table import Column, TextTable
from dlrm_sharded.hardware.detect import detect_hardware, local_hardware
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.measuring.bench import Bench
from dlrm_sharded.measuring.measure import (
    MeasureConfig,
    MeasuredModule,
    measure_modules,
    vectors_of,
)
from dlrm_sharded.model.torchrec_adapter import to_torchrec
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import EXCHANGE_STAGES, STAGES, PlanCost
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.planning import Planner
from studies.on_ranks import Loop, compared_loops, rows_on_ranks
from studies.parts import option
from studies.study import Case, Row

BASIS = "measured"
KINDS = {"bags": 0.0, "sequences": 1.0, "both": 0.5}
"""Fractions of the tables that are sequences, by kind of model."""

DRAWN, WIDE = SHAPES = ("drawn", "wide")
OURS = "neuroshard"
SHARDERS = (OURS, "torchrec_blind", "torchrec")
BEST = "best other"
DOMINATES = 0.5
"""Share of a step from which exchanges dominate it."""

TRAINED_RANKS, SIMULATED_RANKS = 2, 4

WIDE_TABLES, WIDE_ROWS, WIDE_DIMS = (4, 16), (200, 20_000), (64, 128, 256)
BAG_IDS, HISTORY_IDS = (1.0, 2.0), (1.0, 64.0)
WIDE_BATCH_SIZE = 2048

OPTIONS = {
    "kinds": option(tuple(KINDS), "bags, sequences or both", choices=list(KINDS)),
    "tasks": option(4, "tasks of each kind and number of ranks, half of them wide"),
    "calibrated": option(str, "artefact of a calibration here, instead of the one that is found"),
    "seed": option(0, "of the tasks, plans and ids"),
    "sharders": option(SHARDERS, SHARDERS_TEXT),
    "steps": option(4, "steps of a plan in one round on two ranks"),
    "rounds": option(8, "rounds on two ranks"),
    "rank_rounds": option(3, "times that each rank of a plan for four is measured"),
    "iterations": option(6, "iterations of a measurement"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the job of two ranks for each kind of model, and each task on four."""
    for kind in options.kinds:
        yield Case(f"{TRAINED_RANKS} ranks, {kind}", functools.partial(_trained, options, kind))
    for number in range(options.tasks):
        for kind in options.kinds:
            run = functools.partial(_rank_by_rank, options, kind, number)
            yield Case(f"{SIMULATED_RANKS} ranks, {kind} {number}", run)


def task_of_kind(kind: str, number: int, world_size: int, seed: int) -> ShardingTask:
    """Return a task; those of odd numbers are wide."""
    topology = Topology(world_size, memory_bytes=GIB, compute_device="cpu")
    rng = np.random.default_rng([seed, number, world_size, *kind.encode()])
    if shape_of(number) == DRAWN:
        task = trained_task(number, topology, seed=seed)
    else:
        ids = BAG_IDS if kind == "bags" else HISTORY_IDS
        task = ShardingTask(_wide_tables(rng, ids), topology, WIDE_BATCH_SIZE)
    return with_profiles(with_sequences(task, rng, KINDS[kind]))


def shape_of(number: int) -> str:
    return SHAPES[number % 2]


def _wide_tables(rng: np.random.Generator, ids: tuple[float, float]) -> tuple[Table, ...]:
    """Return tables with few rows and wide vectors, and numbers of ids from a range."""
    return tuple(
        Table(
            f"t{i}",
            round(np.exp(rng.uniform(*np.log(WIDE_ROWS)))),
            int(rng.choice(WIDE_DIMS)),
            float(np.exp(rng.uniform(*np.log(ids)))),
        )
        for i in range(int(rng.integers(*WIDE_TABLES, endpoint=True)))
    )


def _planners(options: argparse.Namespace, hardware: Hardware) -> dict[str, Planner]:
    """Return planners by sharder; their prices are those of an artefact, if one is named."""
    artefact = options.calibrated
    prices = f",cost_model.artifact={artefact}" if artefact else ""
    return {name: planner_of(name + prices, hardware=hardware) for name in options.sharders}


def _trained(options: argparse.Namespace, kind: str) -> list[Row]:
    settings = {key: getattr(options, key) for key in OPTIONS}
    return rows_on_ranks(__name__, TRAINED_RANKS, kind=kind, **settings)


def rows_on_rank(rank: Rank, *, kind: str, **settings: Any) -> list[Row]:
    """Train all plans of every task on the ranks of this job."""
    torch.set_num_threads(1)
    options = argparse.Namespace(**settings)
    config = MeasureConfig(iterations=options.iterations, warmup=1, num_batches=NUM_BATCHES)
    bench = Bench(config, rank.device, optimizer=OPTIMIZER, table_bytes=0)
    planners = _planners(options, detect_hardware(rank))
    rows: list[Row] = []
    for number in range(options.tasks):
        task = task_of_kind(kind, number, rank.world_size, options.seed)
        plans = on_rank_zero(functools.partial(_plans, task, planners))
        ids = ids_of(task, options.seed)
        batches = [ids_of_rank(ids, batch, rank) for batch in range(NUM_BATCHES)]
        sharded = [
            bench.shard(task.tables, to_torchrec(plan, task.tables, task.topology), batches)
            for plan in plans
        ]
        costs = [measure_modules(modules, config).cost for modules in sharded]
        loops: dict[str, Loop] = {
            f"{place:02}": TableSteps(modules, options.steps)
            for place, modules in enumerate(sharded)
        }
        loop_rows = compared_loops(loops, rank, steps=options.steps, rounds=options.rounds)
        for (names, predicted), cost, row in zip(plans.values(), costs, loop_rows, strict=True):
            timed = {"step_ms": row["step_ms"]} | _figures(cost, float(np.median(row["step_ms"])))
            rows += [_row(kind, number, rank.world_size, of, predicted) | timed for of in names]
        del sharded, loops
        gc.collect()  # sharded modules are in reference cycles, and own their tables
    return rows


def _plans(
    task: ShardingTask, planners: Mapping[str, Planner]
) -> dict[ShardingPlan, tuple[list[str], PlanCost]]:
    """Return the different plans, with their sharders and predicted costs."""
    found: dict[ShardingPlan, tuple[list[str], PlanCost]] = {}
    for name, planner in planners.items():
        with contextlib.suppress(ShardingError):
            plan, plan_report = planner.plan(task)
            assert plan_report.cost is not None
            found.setdefault(plan, ([], plan_report.cost))[0].append(name)
    return found


@dataclass(frozen=True, slots=True)
class TableSteps:
    """Training steps of sharded modules, with the batches in turn."""

    modules: Sequence[MeasuredModule]
    num: int

    def __call__(self) -> None:
        for i in range(self.num):
            outputs = [of.embeddings(of.batches[i % len(of.batches)]) for of in self.modules]
            vectors = [found for output in outputs for found in vectors_of(output.wait())]
            torch.autograd.backward(vectors, [torch.ones_like(found) for found in vectors])
            for of in self.modules:
                if of.replica_optimizer is not None:
                    of.replica_optimizer.step()
                    of.replica_optimizer.zero_grad()


def _rank_by_rank(options: argparse.Namespace, kind: str, number: int) -> list[Row]:
    """Measure the computation of all plans' ranks, one rank after the other."""
    task = task_of_kind(kind, number, SIMULATED_RANKS, options.seed)
    rng = np.random.default_rng([options.seed, number])
    with open_bench(options.iterations, table_bytes=GIB) as (bench, device):
        planners = _planners(options, local_hardware(device))
        rows = task_rows(number, task, planners, bench, rng, rounds=options.rank_rounds)
    return [
        _row(kind, number, SIMULATED_RANKS, row["sharder"], PlanCost.from_json(row["predicted"]))
        | {"step_ms": row["cost_rounds_ms"]}
        | _figures(PlanCost.from_json(row["measured"]), row["cost_ms"])
        for row in rows
        if "measured" in row
    ]


def _row(kind: str, number: int, world_size: int, sharder: str, predicted: PlanCost) -> Row:
    return {
        "set": f"{kind}, {shape_of(number)}",
        "number": number,
        "world_size": world_size,
        "sharder": sharder,
        "predicted_ms": predicted.cost_ms,
    }


def _figures(cost: PlanCost, median_ms: float) -> Row:
    """Return the median of a plan's rounds, its measured stages, and the share of exchanges."""
    stages_ms = {stage: cost.stage_max_ms(stage) for stage in STAGES}
    exchange_ms = sum(stages_ms[stage] for stage in EXCHANGE_STAGES)
    return {
        "median_ms": median_ms,
        "exchange_share": exchange_ms / sum(stages_ms.values()),
        "stages_ms": stages_ms,
    }


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write how our steps compare with those of each other sharder and of the best of them."""
    ours, texts = reference or OURS, []
    for world_size in dict.fromkeys(row["world_size"] for row in rows):
        found = [row for row in rows if row["world_size"] == world_size]
        noise = figures.noise_of(found, "step_ms")
        rounds, num_others = len(found[0]["step_ms"]), len(figures.sharders_of(found)) - 1
        what = "steps" if world_size == TRAINED_RANKS else "costs, with predicted exchanges"
        texts += [
            f"{world_size} ranks: {what}, medians of {rounds} interleaved rounds, which are off by "
            f"{100 * noise:.1f} % (one standard error):",
            *_tables(found, ours, figures.noise_margin(noise, others=num_others)),
        ]
    return "\n\n".join(texts)


def _tables(rows: Sequence[Row], ours: str, margin: float) -> list[str]:
    """Return tables of the sets of tasks, and of all tasks of a number of ranks."""
    costs = figures.costs_of(rows, "median_ms")
    others = [sharder for sharder in costs if sharder != ours]
    by_plan = {(figures.task_of(row), row["sharder"]): row for row in rows}
    best: dict[figures.Task, float] = {}
    shares: dict[figures.Task, float] = {}
    sets: dict[str, list[figures.Task]] = {}
    lines: list[list[Any]] = []
    for task, our_ms in costs[ours].items():
        having = [name for name in others if task in costs[name]]
        if not having:
            continue
        first = min(having, key=lambda name: costs[name][task])
        best[task] = costs[first][task]
        of_task = [row for (key, _), row in by_plan.items() if key == task]
        shares[task] = float(np.mean([row["exchange_share"] for row in of_task]))
        sets.setdefault(str(task[0]), []).append(task)
        if shares[task] > DOMINATES:
            sets.setdefault(f"exchanges above {DOMINATES:.0%}", []).append(task)
        pairs = [by_plan[task, name]["step_ms"] for name in (ours, first)]
        ratio = figures.interval_text(np.divide(*pairs), ".3f")
        cells = [f"{task[0]} {task[2]}", 100 * shares[task], our_ms]
        lines.append([*cells, *(costs[name].get(task) for name in others), ratio])
    costs[BEST] = best
    summary = [
        [
            name,
            len(tasks),
            100 * float(np.mean([shares[task] for task in tasks])),
            *(figures.versus(_of_tasks(costs, tasks), ours, other) for other in (*others, BEST)),
            figures.versus(_of_tasks(costs, tasks), ours, BEST, margin=margin).score,
        ]
        for name, tasks in sorted(sets.items())
    ]
    share = Column("exchanges, %", ".0f")
    medians = [Column(f"{name}, ms", ".1f") for name in (ours, *others)]
    titles = [f"{ours} / {other} [95 %]" for other in (*others, BEST)]
    return [
        TextTable(["tasks", "number", share, *titles, "wins/ties/losses"], summary).markdown(),
        TextTable(["task", share, *medians, titles[-1]], lines).markdown(),
    ]


def _of_tasks(costs: figures.Costs, tasks: Sequence[figures.Task]) -> figures.Costs:
    return {
        name: {task: ms for task, ms in by_task.items() if task in tasks}
        for name, by_task in costs.items()
    }
