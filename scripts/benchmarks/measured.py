"""Measured cost of plans of several sharders: whether what the cost model promises is there.

Each rank's shards are looked up alone, on one core of this machine; communication is what the model
predicts. The tasks are those of `measured_tasks`; accesses have the Zipf exponent that the model
assumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.compared import (
    SHARDERS_HELP,
    Rows,
    costs_of,
    markdown,
    mean_with_interval,
    planner_of,
    quiet,
    read_rows,
    reference_of,
    versus,
)
from dlrm_sharded.cost.alone import Bench, TableIds, draw_ids
from dlrm_sharded.cost.evaluate import Comparison
from dlrm_sharded.cost.learned import with_profiles
from dlrm_sharded.cost.measure import MeasureConfig
from dlrm_sharded.cost.types import PlanCost, StageCost
from dlrm_sharded.data.task_sets import MEASURED_RANK_BYTES, measured_tasks
from dlrm_sharded.distributed import process_group
from dlrm_sharded.errors import ShardingError
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.planning import Planner
from dlrm_sharded.provenance import device_name
from dlrm_sharded.task import ShardingTask

SHARDERS = ("neuroshard", "neuroshard_paper", "torchrec", "size_lookup")
OPTIMIZER = "rowwise_adagrad"
NUM_BATCHES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of tasks, ids and order")
    parser.add_argument("--sharders", nargs="+", default=SHARDERS, help=SHARDERS_HELP)
    parser.add_argument("--reference", help="to compare the others with [neuroshard_paper]")
    parser.add_argument(
        "--rounds", type=int, default=3, help="each rank is built and measured anew"
    )
    parser.add_argument("--iterations", type=int, default=8, help="of one rank in one round")
    parser.add_argument("--jsonl", type=Path, help="new file, a line for each plan")
    parser.add_argument(
        "--from", type=Path, dest="from_file", help="tables of such a file, nothing is run"
    )


def run(options: argparse.Namespace) -> None:
    if options.from_file:
        report(read_rows(options.from_file), options.reference)
        return
    reference_of(options.reference, options.sharders)
    rows = Rows(options.jsonl)
    measure_plans(options, rows)
    report(rows.rows, options.reference)


def bench_config(iterations: int) -> MeasureConfig:
    return MeasureConfig(iterations=iterations, warmup=2, num_batches=NUM_BATCHES)


def measure_plans(options: argparse.Namespace, rows: Rows) -> None:
    """A row for each plan, as soon as all plans of its task are measured."""
    quiet()
    torch.set_num_threads(1)
    with process_group() as rank:
        planners = {
            sharder: planner_of(sharder, device=rank.device.type, hardware=device_name(rank.device))
            for sharder in options.sharders
        }
        bench = Bench(
            bench_config(options.iterations),
            rank.device,
            table_bytes=MEASURED_RANK_BYTES,
            optimizer=OPTIMIZER,
        )
        for number, of_set in enumerate(measured_tasks(options.seed, num=options.tasks)):
            topology = dataclasses.replace(of_set.task.topology, compute_device=rank.device.type)
            task = dataclasses.replace(with_profiles(of_set.task), topology=topology)
            planned = [_plan(number, sharder, of, task) for sharder, of in planners.items()]
            seed = [options.seed, number]
            measured = _interleaved(bench, task, planned, rounds=options.rounds, seed=seed)
            for row in measured:
                rows.add(row)
            print(_line(number, measured), flush=True)


@dataclass(frozen=True, slots=True)
class Planned:
    """A sharder's plan, and its predicted cost; None where it has none."""

    number: int
    sharder: str
    plan: ShardingPlan | None
    predicted: PlanCost | None


def _plan(number: int, sharder: str, planner: Planner, task: ShardingTask) -> Planned:
    assert planner.cost_model is not None
    try:
        plan = planner.plan(task)
    except ShardingError:
        return Planned(number, sharder, None, None)
    return Planned(number, sharder, plan, planner.cost_model.predict(plan, task))


def _interleaved(
    bench: Bench,
    task: ShardingTask,
    planned: Sequence[Planned],
    *,
    rounds: int,
    seed: Sequence[int],
) -> list[dict[str, Any]]:
    """Measure all ranks of all plans in a new random order in each round, on the same ids."""
    rng = np.random.default_rng(seed)
    ids = draw_ids(
        task.tables,
        batch_size=task.batch_size,
        num_batches=NUM_BATCHES,
        seed=int(rng.integers(2**32)),
    )
    ranks = range(task.topology.world_size)
    slots = [(i, rank) for i, of in enumerate(planned) if of.plan is not None for rank in ranks]
    measured: dict[tuple[int, int], list[StageCost]] = {slot: [] for slot in slots}
    for _ in range(rounds):
        for place in rng.permutation(len(slots)):
            i, rank = slots[place]
            measured[i, rank].append(_measure_rank(bench, planned[i].plan, rank, ids))
    return [
        _row(of, [measured[i, rank] for rank in ranks] if of.plan is not None else [])
        for i, of in enumerate(planned)
    ]


def _measure_rank(bench: Bench, plan: ShardingPlan | None, rank: int, ids: TableIds) -> StageCost:
    assert plan is not None
    shards = [shard for shard in plan.shards if shard.rank == rank]
    return bench.measure(shards, ids) if shards else StageCost(0.0, 0.0, 0.0, 0.0)


def _row(of: Planned, rounds_by_rank: Sequence[Sequence[StageCost]]) -> dict[str, Any]:
    row: dict[str, Any] = {"number": of.number, "sharder": of.sharder}
    if of.plan is None or of.predicted is None:
        return row
    measured = PlanCost(
        tuple(
            StageCost(
                statistics.median(each.fwd_compute_ms for each in rounds),
                predicted.fwd_comm_ms,
                predicted.bwd_comm_ms,
                statistics.median(each.bwd_compute_ms for each in rounds),
            )
            for rounds, predicted in zip(rounds_by_rank, of.predicted.per_rank, strict=True)
        )
    )
    return row | {
        "plan": of.plan.to_json()["shards"],
        "predicted": of.predicted.to_json(),
        "measured": measured.to_json(),
        "rounds_ms": [[_compute_ms(each) for each in rounds] for rounds in rounds_by_rank],
        "cost_ms": measured.cost_ms,
        "predicted_ms": of.predicted.cost_ms,
        "compute_ms": max(map(_compute_ms, measured.per_rank)),
        "predicted_compute_ms": max(map(_compute_ms, of.predicted.per_rank)),
    }


def _compute_ms(cost: StageCost) -> float:
    return cost.fwd_compute_ms + cost.bwd_compute_ms


def _line(number: int, rows: Sequence[dict[str, Any]]) -> str:
    costs = (
        f"{row['sharder']} {row['cost_ms']:.2f} ({row['predicted_ms']:.2f})"
        if "cost_ms" in row
        else f"{row['sharder']} no plan"
        for row in rows
    )
    return f"task {number}: measured (predicted) ms: {', '.join(costs)}"


def report(rows: Sequence[dict[str, Any]], chosen_reference: str | None) -> None:
    """Whether the sharders differ as the model says, and how far it is off."""
    sharders = list(dict.fromkeys(row["sharder"] for row in rows))
    reference = reference_of(chosen_reference, sharders)
    figures = {
        key: costs_of(rows, key)
        for key in ("cost_ms", "predicted_ms", "compute_ms", "predicted_compute_ms")
    }
    lines = []
    for sharder in sharders:
        against = {key: versus(costs, sharder, reference) for key, costs in figures.items()}
        measured = against["cost_ms"]
        lines.append(
            [
                sharder,
                measured.num,
                *(against[key] for key in figures),
                f"{measured.wins}/{measured.ties}/{measured.losses}",
            ]
        )
    header = ["sharder", "tasks", "cost measured", "predicted"]
    header += ["slowest rank's computation measured", "predicted", "wins/ties/losses measured"]
    print(f"\nover {reference}, mean [95 %], on the tasks that both solve:\n")
    print(markdown(header, lines))
    print(f"\nthe model's errors:\n\n{_errors(rows, sharders)}")
    print(f"\none round from the median of its rank's: {_round_spread(rows):.1f} % (mean absolute)")


def _errors(rows: Sequence[dict[str, Any]], sharders: Sequence[str]) -> str:
    """Predicted over measured: of every rank's computation and of whole plans."""
    lines = []
    for sharder in sharders:
        ranks, plans = Comparison(), Comparison()
        for row in rows:
            if row["sharder"] != sharder or "cost_ms" not in row:
                continue
            plans.add(row["predicted_ms"], row["cost_ms"])
            costs = (PlanCost.from_json(row[key]).per_rank for key in ("predicted", "measured"))
            for predicted, measured in zip(*costs, strict=True):
                if _compute_ms(measured) > 0:
                    ranks.add(_compute_ms(predicted), _compute_ms(measured))
        cells: list[object] = [sharder]
        for pairs in (ranks, plans):
            errors = 100 * pairs.relative_errors
            mean, low, high = mean_with_interval(errors)
            cells += [f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]", f"{np.abs(errors).mean():.1f}"]
            cells.append(f"{np.std(errors):.1f}")
        lines.append(cells)
    of = ("bias, % [95 %]", "MAPE, %", "spread, %")
    header = [f"{what}: {error}" for what in ("rank's computation", "cost") for error in of]
    return markdown(["sharder", *header], lines)


def _round_spread(rows: Sequence[dict[str, Any]]) -> float:
    """In percent: how well a rank's computation repeats."""
    errors = [
        abs(once / statistics.median(rounds) - 1)
        for row in rows
        for rounds in row.get("rounds_ms", [])
        for once in rounds
        if once > 0
    ]
    return 100 * statistics.fmean(errors)
