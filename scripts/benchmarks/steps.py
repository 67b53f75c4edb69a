"""Predicted steps against measured ones, of several plans of random models on the ranks here.

All plans of a case are trained in one job, in turns and on the same batches. Each case has a job,
tables, batch size and layers of its own; none of them is in any fit. Rounds are short, and each of
them has a few steps of the dense part alone, of each plan's embeddings alone and of each plan's
training, so that a machine that gets slower meanwhile slows all of them. Predictions from the
plan's predicted cost and from its measured cost are compared with the measured step.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch

from benchmarks import step_errors
from benchmarks.figures import noise_of, sharder_table
from benchmarks.loop import loop_options
from benchmarks.planners import SHARDERS_TEXT, planner_of
from benchmarks.training import OPTIMIZER, Training, dataset_of, new_dlrm, stream
from dlrm_sharded.datasets.task_sets import trained_task
from dlrm_sharded.dense.times import DenseBench, measure_all_reduce
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.job.predicted_step import host_time_of, overlap_of
from dlrm_sharded.measuring.measure import MeasureConfig, MeasuredCost, measure
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.replicas import replica_part
from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, detect_topology
from dlrm_sharded.step.prediction import DensePart, predict_step
from dlrm_sharded.training.trainer import TrainerConfig
from studies.on_ranks import rows_on_ranks
from studies.parts import option
from studies.study import Case, Row

BASIS = "measured"
SHARDERS = ("neuroshard", "torchrec", "dim", "random")
NUM_BATCHES = 4
MEMORY_GIB = 1.0
NUM_WARMUP_STEPS = 1
MEASURED = MeasureConfig(iterations=3, warmup=1, num_batches=NUM_BATCHES)
DENSE_ITERATIONS = 3
ALL_REDUCE_ITERATIONS = 3
WIDTHS = (32, 64, 128, 256)
DIMS = (16, 32, 64)


OPTIONS = {
    **loop_options(steps=4, rounds=6),
    "first": option(0, "number of the first case"),
    "cases": option(20),
    "seed": option((0,), "seeds of each case"),
    "sharders": option(SHARDERS, SHARDERS_TEXT),
    "widths": option(WIDTHS, "of the dense layers"),
}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield a case, which is a job, for each model and seed."""
    for number in range(options.first, options.first + options.cases):
        for seed in options.seed:
            name = f"case {number}, seed {seed}" if options.seed[1:] else f"case {number}"
            yield Case(name, functools.partial(_rows, options, number, seed))


def _rows(options: argparse.Namespace, number: int, seed: int) -> list[Row]:
    rows = rows_on_ranks(
        __name__,
        options.ranks,
        number=number,
        seed=seed,
        steps=options.steps,
        widths=options.widths,
        sharders=options.sharders,
        rounds=options.rounds,
    )
    print(_line(number, rows), flush=True)
    return rows


def rows_on_rank(rank: Rank, *, sharders: Sequence[str], rounds: int, **settings: Any) -> list[Row]:
    return RandomCase(rank=rank, **settings).rows(sharders, rounds=rounds)


@dataclass(slots=True)
class _Trained:
    """A plan under training, and what was measured of it in each round."""

    training: Training
    step_ms: list[float] = field(default_factory=list)
    costs: list[MeasuredCost] = field(default_factory=list)

    def measured(self, batches: Sequence[Batch]) -> MeasuredCost:
        """Measure the embeddings."""
        return measure(
            sharded_embeddings(self.training.sharded),
            [batch.sparse_features for batch in batches],
            MEASURED,
            replica_optimizer=replica_part(self.training.optimizer),
        )


class _Dense:
    """The dense part of a case, measured a few steps at a time; all ranks call it together."""

    def __init__(self, bench: DenseBench, rank: Rank) -> None:
        self._bench = bench
        self._rank = rank
        self._all_reduce_ms: list[float] = []

    def measure(self) -> None:
        dist.barrier()
        self._bench.run(DENSE_ITERATIONS)
        self._all_reduce_ms.append(
            measure_all_reduce(
                self._bench.gradient_bytes,
                self._rank.device,
                iterations=ALL_REDUCE_ITERATIONS,
                warmup=1,
            )
        )

    def part(self) -> DensePart:
        """Return the medians of all steps so far."""
        times = self._bench.times()
        by_rank = [times] * self._rank.world_size
        dist.all_gather_object(by_rank, times)
        return DensePart(tuple(by_rank), float(np.median(self._all_reduce_ms)))


class RandomCase:
    """A random task and model."""

    def __init__(
        self, *, number: int, seed: int, rank: Rank, steps: int, widths: Sequence[int]
    ) -> None:
        rng = np.random.default_rng([seed, number, 1])
        topology = detect_topology(memory_gib=MEMORY_GIB)
        self.number, self.seed = number, seed
        self.rank = rank
        self.steps = steps
        drawn = trained_task(number, topology, seed=seed)
        self.dataset = dataset_of(drawn.tables, drawn.batch_size, max(steps, NUM_BATCHES))
        self.task = ShardingTask(self.dataset.tables, topology, drawn.batch_size)
        dim, width = int(rng.choice(DIMS)), int(rng.choice(widths))
        self.dense_layers = [2 * width, width, dim]
        self.over_layers = [2 * width, width, 1]

    def build(self, device: torch.device) -> Dlrm:
        return new_dlrm(self.task.tables, self.dense_layers, self.over_layers, device)

    def rows(self, sharders: Sequence[str], *, rounds: int) -> list[Row]:
        """Train under the plan of every sharder; return a row for each different plan."""
        plans = self._plans(sharders)
        train_stream = stream(self.dataset, self.rank)
        batches = [next(train_stream).to(self.rank.device) for _ in range(NUM_BATCHES)]
        trained = {
            plan: _Trained(Training.under(plan, self.build(self.rank.device), self.task, self.rank))
            for plan in plans
        }
        config = TrainerConfig(num_steps=self.steps, num_warmup_steps=NUM_WARMUP_STEPS)
        dense = _Dense(
            DenseBench(self.build(self.rank.device), self.task.tables, batches, OPTIMIZER),
            self.rank,
        )
        order = list(plans)
        for i in range(rounds + 1):
            dense.measure()
            shift = i % len(order)
            for plan in (order[shift:] + order[:shift])[:: -1 if i % 2 else 1]:
                cost = trained[plan].measured(batches)
                dist.barrier()
                step_ms = trained[plan].training.train(self.dataset, config).step_ms
                if i > 0:  # the first round allocates memory
                    trained[plan].costs.append(cost)
                    trained[plan].step_ms.append(step_ms)
        dense_part = dense.part()
        return [
            self._row(names, cost, trained[plan], dense_part)
            for plan, (names, cost) in plans.items()
        ]

    def _row(
        self, sharders: Sequence[str], predicted: PlanCost, trained: _Trained, dense: DensePart
    ) -> Row:
        """Return the figures of a plan; each is the median of its rounds."""
        predict = functools.partial(
            predict_step,
            dense=dense,
            overlap=overlap_of(TrainerConfig(), self.rank),
            batch_size=self.task.batch_size,
        )
        hosts = [host_time_of(measured, dense, self.rank) for measured in trained.costs]
        composed_ms = [
            predict(measured.cost, host=host).step_ms
            for measured, host in zip(trained.costs, hosts, strict=True)
        ]

        def median(key: str) -> float:
            return float(np.median([getattr(found.cost, key) for found in trained.costs]))

        return {
            "seed": self.seed,
            "number": self.number,
            "world_size": self.rank.world_size,
            "sharders": sharders,
            "step_ms": trained.step_ms,
            "composed_ms": float(np.median(composed_ms)),
            "predicted_ms": predict(predicted, host=hosts[-1]).step_ms,
            "cost_ms": median("critical_path_ms"),
            "predicted_cost_ms": predicted.critical_path_ms,
            "input_dist_ms": median("input_dist_max_ms"),
            "predicted_input_dist_ms": predicted.input_dist_max_ms,
            "dense_ms": dense.mean_ms,
            "all_reduce_ms": dense.all_reduce_ms,
            "spread": dense.by_rank[0].spread,
            "batch_size": self.task.batch_size,
            "num_tables": len(self.task.tables),
        }

    def _plans(self, sharders: Sequence[str]) -> dict[ShardingPlan, tuple[list[str], PlanCost]]:
        """Return the different plans, with their sharders and predicted costs."""
        hardware = detect_hardware(self.rank)

        def plan_all() -> dict[ShardingPlan, tuple[list[str], PlanCost]]:
            found: dict[ShardingPlan, tuple[list[str], PlanCost]] = {}
            for sharder in sharders:
                planner = planner_of(sharder, device=self.rank.device.type, hardware=hardware)
                try:
                    plan, plan_report = planner.plan(self.task)
                except ShardingError:
                    continue
                assert plan_report.cost is not None
                found.setdefault(plan, ([], plan_report.cost))[0].append(sharder)
            return found

        return on_rank_zero(plan_all)


def _line(number: int, rows: Sequence[Row]) -> str:
    texts = (
        f"{'/'.join(row['sharders'])} {np.median(row['step_ms']):.1f} "
        f"({row['predicted_ms']:.1f}, {row['composed_ms']:.1f})"
        for row in rows
    )
    return f"case {number}: measured (predicted, composed) ms: {', '.join(texts)}"


def report(rows: Sequence[Row], reference: str | None) -> str:
    """Write the errors of the predictions, and how long steps take under each sharder's plans."""
    by_sharder = [
        row | {"sharder": sharder, "median_ms": float(np.median(row["step_ms"]))}
        for row in rows
        for sharder in row["sharders"]
    ]
    table = sharder_table(
        by_sharder,
        reference,
        {"step": "median_ms", "predicted": "predicted_ms"},
        noise=noise_of(rows, "step_ms"),
    )
    return f"{step_errors.report(rows)}\n\n{table}"
