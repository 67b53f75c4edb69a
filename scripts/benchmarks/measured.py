"""Measured costs of the plans of several sharders, beside the costs that the model predicts.

Each rank's shards are looked up by themselves on one core of this machine, and communication has
its predicted time. The tasks come from `measured_tasks`, and their accesses have the Zipf exponent
that the model assumes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.figures import (
    choose_reference,
    costs_of,
    interval_text,
    noise_of,
    rows_table,
    sharder_table,
    sharders_of,
    versus,
)
from benchmarks.planners import SHARDERS_TEXT, on_device, planners_of
from dlrm_sharded.accesses.patterns import AccessPattern
from dlrm_sharded.contest.measure import Rounds, measure_plans
from dlrm_sharded.contest.measurement import Measurement
from dlrm_sharded.cost.learned import KIND
from dlrm_sharded.datasets.task_sets import MEASURED_RANK_BYTES, measured_tasks
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.fitting.evaluate import TimePairs
from dlrm_sharded.hardware.artifact import CALIBRATED, find_artifact
from dlrm_sharded.hardware.artifact_kinds import cost_model_kind
from dlrm_sharded.hardware.detect import local_hardware
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.measuring.rank_bench import RankBench
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.sharders.planning import Planner
from studies.parts import option
from studies.processes import quiet
from studies.study import Case, Row

BASIS = "measured"
SHARDERS = ("neuroshard", "neuroshard_paper", "torchrec", "torchrec_calibrated", "size_lookup")
OPTIMIZER = "rowwise_adagrad"
NUM_BATCHES = 3
COSTS = ("cost_ms", "predicted_ms", "compute_ms", "predicted_compute_ms")


OPTIONS = {
    "tasks": option((40,), "tasks of each number of ranks"),
    "ranks": option((4,), "ranks of the plans"),
    "seed": option(0, "seed of tasks, ids and order"),
    "link_gb_per_s": option(float, "stated speed of the links in a host"),
    "share": option(1, "divisor of all sizes"),
    "sharders": option(SHARDERS, SHARDERS_TEXT),
    "rounds": option(3, "times that each rank is built and measured anew"),
    "iterations": option(8, "iterations of a rank in one round"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield a case for each task, whose plans are measured in turns."""
    num_tasks = [*options.tasks] * len(options.ranks) if len(options.tasks) == 1 else options.tasks
    for world_size, num in zip(options.ranks, num_tasks, strict=True):
        for number in range(num):
            name = f"{world_size} ranks, task {number}" if options.ranks[1:] else f"task {number}"
            yield Case(name, functools.partial(_rows, options, world_size, number))


def _rows(options: argparse.Namespace, world_size: int, number: int) -> list[Row]:
    tasks = measured_tasks(options.seed, num=number + 1, world_size=world_size)
    table_bytes = MEASURED_RANK_BYTES // options.share
    with open_bench(options.iterations, table_bytes=table_bytes) as (bench, device):
        task = _scaled(tasks[number].task, options)
        planners = planners_of(
            options.sharders, device=device.type, hardware=local_hardware(device)
        )
        rng = np.random.default_rng([options.seed, number])
        rows = task_rows(
            number, on_device(task, device.type), planners, bench, rng, rounds=options.rounds
        )
        model = cost_model_file(device)
    costs = (
        f"{row['sharder']} {row['cost_ms']:.2f} ({row['predicted_ms']:.2f})"
        if "cost_ms" in row
        else f"{row['sharder']} no plan"
        for row in rows
    )
    print(f"task {number}: measured (predicted) ms: {', '.join(costs)}", flush=True)
    return [row | {"world_size": world_size, "cost_model": model} for row in rows]


def _scaled(task: ShardingTask, options: argparse.Namespace) -> ShardingTask:
    """Return the task with stated links, and with smaller sizes."""
    topology, share = task.topology, options.share
    topology = dataclasses.replace(topology, memory_bytes=topology.memory_bytes // share)
    if options.link_gb_per_s:
        rate = 1e9 * options.link_gb_per_s
        topology = dataclasses.replace(topology, intra_host_bytes_per_s=rate)
    tables = tuple(
        dataclasses.replace(table, num_embeddings=max(1, table.num_embeddings // share))
        for table in task.tables
    )
    return dataclasses.replace(
        task, batch_size=task.batch_size // share, topology=topology, tables=tables
    )


@contextlib.contextmanager
def open_bench(
    iterations: int,
    *,
    table_bytes: int,
    threads: int = 1,
    build: Callable[..., RankBench] = RankBench,
) -> Iterator[tuple[RankBench, torch.device]]:
    """Yield a bench and the device that it measures on: a GPU, or threads of the CPU."""
    quiet()
    torch.set_num_threads(threads)
    config = MeasureConfig(iterations=iterations, warmup=2, num_batches=NUM_BATCHES)
    with process_group() as rank:
        bench = build(config, rank.device, table_bytes=table_bytes, optimizer=OPTIMIZER)
        yield bench, rank.device


def cost_model_file(device: torch.device) -> str:
    """Return the file of the model that prices plans here."""
    kind = cost_model_kind(KIND)
    return str(find_artifact(kind, local_hardware(device), device.type, CALIBRATED).resolve())


def task_rows(
    number: int,
    task: ShardingTask,
    planners: Mapping[str, Planner],
    bench: RankBench,
    rng: np.random.Generator,
    *,
    rounds: int,
    accesses: Mapping[str, AccessPattern] | None = None,
) -> list[Row]:
    """Return the rows of the sharders' plans of a task, all measured on the same ids.

    Args:
        accesses: see `draw_ids`.
    """
    plans: dict[str, ShardingPlan] = {}
    predicted: dict[str, PlanCost] = {}
    for name, planner in planners.items():
        with contextlib.suppress(ShardingError):
            plans[name], report = planner.plan(task)
            assert report.cost is not None
            predicted[name] = report.cost
    measure = functools.partial(measure_plans, task, plans, predicted, bench)
    measurement = measure(Rounds(rounds, num_batches=NUM_BATCHES), rng, accesses)
    return [
        {"number": number, "sharder": name}
        | (_figures(plans[name], predicted[name], measurement, name) if name in plans else {})
        for name in planners
    ]


def _figures(
    plan: ShardingPlan, predicted: PlanCost, measurement: Measurement, sharder: str
) -> Row:
    measured = measurement.costs[sharder]
    return {
        "plan": plan.to_json()["shards"],
        "predicted": predicted.to_json(),
        "measured": measured.to_json(),
        "cost_rounds_ms": list(measurement.rounds_ms[sharder]),
        "cost_ms": measured.cost_ms,
        "critical_path_ms": measured.critical_path_ms,
        "predicted_ms": predicted.cost_ms,
        "compute_ms": max(cost.computation_ms for cost in measured.per_rank),
        "predicted_compute_ms": predicted_compute_ms(predicted),
    }


def predicted_compute_ms(cost: PlanCost) -> float:
    """Return the expected computation of the slowest rank."""
    return cost.excess_ms + max(rank.computation_ms for rank in cost.per_rank)


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write how much the sharders differ, measured and predicted, and the model's errors."""
    titles = ("cost measured", "predicted", "slowest rank's computation measured", "predicted one")
    noise = noise_of(rows, "cost_rounds_ms")
    texts = [
        f"A median of rounds is off by {100 * noise:.1f} % (one standard error, from the rounds of "
        "this run). Means are of the tasks that both solve."
    ]
    for world_size in dict.fromkeys(row.get("world_size") for row in rows):  # older rows: None
        of_size = [row for row in rows if row.get("world_size") == world_size]
        texts.append(f"Plans for {world_size or 4} ranks:")
        table = dict(zip(titles, COSTS, strict=True))
        texts.append(sharder_table(of_size, reference, table, noise=noise))
    return "\n\n".join([*texts, "the model's errors:", _errors(rows)])


def _errors(rows: Sequence[Row]) -> str:
    """Return a table of the model's errors on every rank's computation and on whole plans."""
    errors: dict[str, TimePairs] = {}
    for row in rows:
        if "cost_ms" not in row:
            continue
        plans = errors.setdefault(f"{row['sharder']}: cost", TimePairs())
        ranks = errors.setdefault(f"{row['sharder']}: rank's computation", TimePairs())
        plans.add(row["predicted_ms"], row["cost_ms"])
        costs = (PlanCost.from_json(row[key]).per_rank for key in ("predicted", "measured"))
        for predicted, measured in zip(*costs, strict=True):
            if measured.computation_ms > 0:
                ranks.add(predicted.computation_ms, measured.computation_ms)
    return rows_table(
        [
            {"name": name, "bias": interval_text(100 * pairs.relative_errors, "+.1f")}
            | pairs.summary()
            for name, pairs in errors.items()
        ],
        {
            "quantity": "{name}",
            "bias, % [95 %]": "{bias}",
            "MAPE, %": "{mape:.1f}",
            "90 % within, %": "{p90:.1f}",
            "rank correlation": "{spearman:.3f}",
        },
    )


def summary(rows: Sequence[Row], reference: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sharders' costs, their ratios and the errors of the model, over all tasks."""
    reference = choose_reference(reference, sharders_of(rows))
    found: dict[str, Any] = {"cost_model": rows[0]["cost_model"]}
    found["tasks"] = len({(row["world_size"], row["number"]) for row in rows})
    shown = {}
    for key in COSTS:
        costs = costs_of(rows, key)
        ratios = {name: versus(costs, name, reference) for name in costs}
        found[key] = {
            name: {str(task[2]): ms for task, ms in by_task.items()}
            for name, by_task in costs.items()
        }
        found[f"{key} over {reference}"] = {name: ratio.mean for name, ratio in ratios.items()}
        found[f"{key} over {reference}, 95 %"] = {
            name: [ratio.low, ratio.high] for name, ratio in ratios.items() if ratio.num > 1
        }
        if key in ("compute_ms", "cost_ms") and "neuroshard" in ratios:
            shown[f"neuroshard, {key} over {reference}"] = str(ratios["neuroshard"])
    pairs = TimePairs()
    for row in rows:
        if "compute_ms" in row:
            pairs.add(row["predicted_compute_ms"], row["compute_ms"])
    if pairs.measured:
        found["errors of the slowest rank's computation"] = pairs.summary()
    return found, shown
