"""Predicted steps against measured ones, of several plans of random models on the ranks here.

All plans of a case are trained in one job, in turns and on the same batches. Each case has its own
tables, batch size and layers; none of them is in any fit. Three predictions are compared with the
measured step: from the plan's predicted cost, from its measured cost, and without variation.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torchrec.datasets.utils import Batch

from benchmarks import on_ranks
from benchmarks.compared import markdown, planner_of, quiet
from dlrm_sharded.calibration.measure import MeasureConfig, measure
from dlrm_sharded.commands.run_step import overlap_of
from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.datasets.task_sets import trained_task
from dlrm_sharded.distributed import Rank, detect_topology, on_rank_zero, process_group
from dlrm_sharded.errors import ShardingError
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.model import Dlrm, dlrm
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.plan_cost import PlanCost
from dlrm_sharded.replicas import replica_part
from dlrm_sharded.sharded_model import shard_model, sharded_embeddings
from dlrm_sharded.step.prediction import DensePart, predict_step
from dlrm_sharded.task import ShardingTask
from dlrm_sharded.training.dense_times import measure_all_reduce, measure_dense
from dlrm_sharded.training.optimizers import OptimizerConfig
from dlrm_sharded.training.trainer import Trainer, TrainerConfig

SHARDERS = ("neuroshard", "torchrec", "size_lookup", "dim", "random")
NUM_DENSE = 13
NUM_BATCHES = 4
MEMORY_GIB = 1.0
MEASURED = MeasureConfig(iterations=8, warmup=2, num_batches=NUM_BATCHES, time_budget_s=1.5)
DENSE_BUDGET_S = 0.5
OPTIMIZER = OptimizerConfig(
    embedding="rowwise_adagrad",
    embedding_learning_rate=0.01,
    dense="adagrad",
    dense_learning_rate=0.01,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_ranks.add_arguments(parser, steps=8, rounds=3)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sharders", nargs="+", default=list(SHARDERS))
    parser.add_argument("--jsonl", type=Path, help="file that gets a line for each plan")
    parser.add_argument(
        "--from", type=Path, dest="from_file", help="report on such a file, and run nothing"
    )


def run(options: argparse.Namespace) -> None:
    """Start the ranks of one job; each runs `main` below."""
    if options.from_file:
        report([json.loads(line) for line in options.from_file.read_text().splitlines()])
        return
    settings = {
        "first": options.first,
        "cases": options.cases,
        "seed": options.seed,
        "jsonl": str(options.jsonl.resolve()) if options.jsonl else None,
    }
    on_ranks.start(__file__, options, json.dumps(settings), *options.sharders)


def main(steps: int, rounds: int, settings_json: str, *sharders: str) -> None:
    warnings.simplefilter("ignore")
    quiet()
    settings = json.loads(settings_json)
    rows: list[dict[str, Any]] = []
    with process_group() as rank:
        for number in range(settings["first"], settings["first"] + settings["cases"]):
            case = Case(number, settings["seed"], rank, steps=steps)
            found = case.rows(sharders, rounds=rounds)
            rows += found
            if rank.is_zero:
                print(_line(number, found), flush=True)
                if settings["jsonl"]:
                    with Path(settings["jsonl"]).open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in found)
        if rank.is_zero:
            report(rows)


@dataclass(slots=True)
class _Trained:
    """A plan under training."""

    trainer_loop: on_ranks.Loop
    measured: PlanCost
    step_ms: list[float]


class Case:
    """A random task and model."""

    def __init__(self, number: int, seed: int, rank: Rank, *, steps: int) -> None:
        rng = np.random.default_rng([seed, number, 1])
        topology = detect_topology(memory_gib=MEMORY_GIB)
        self.number = number
        self.rank = rank
        self.steps = steps
        drawn = trained_task(number, topology, seed=seed)
        self.dataset = SyntheticDataset(
            drawn.tables,
            batch_size=drawn.batch_size,
            num_train_batches=max(steps, NUM_BATCHES),
            num_val_batches=0,
            pregenerate=True,
        )
        self.task = ShardingTask(self.dataset.tables, topology, drawn.batch_size)
        dim = int(rng.choice([16, 32, 64]))
        width = int(rng.choice([64, 256, 512]))
        self.dense_layers = [2 * width, width, dim]
        self.over_layers = [2 * width, width, 1]

    def build(self, device: torch.device) -> Dlrm:
        model = dlrm(
            self.task.tables,
            NUM_DENSE,
            dense_layers=self.dense_layers,
            over_layers=self.over_layers,
            device=device,
        )
        OPTIMIZER.fuse_into(model)
        return model

    def rows(self, sharders: Sequence[str], *, rounds: int) -> list[dict[str, Any]]:
        """Train under the plan of every sharder; return a row for each different plan."""
        plans = self._plans(sharders)
        batches = [batch.to(self.rank.device) for batch in self._batches()]
        dense = self._dense(batches)
        trained = {plan: self._trained(plan, batches) for plan in plans}
        order = list(plans)
        for i in range(rounds + 1):
            shift = i % len(order)
            for plan in (order[shift:] + order[:shift])[:: -1 if i % 2 else 1]:
                step_ms = 1e3 * on_ranks.timed(trained[plan].trainer_loop, self.rank) / self.steps
                if i > 0:  # the first round allocates memory
                    trained[plan].step_ms.append(step_ms)
        predict = functools.partial(
            predict_step,
            overlap=overlap_of(TrainerConfig(), self.rank),
            batch_size=self.task.batch_size,
        )
        rows = []
        for plan, (names, cost) in plans.items():
            of_plan = trained[plan]
            rows.append(
                {
                    "number": self.number,
                    "world_size": self.rank.world_size,
                    "sharders": names,
                    "step_ms": of_plan.step_ms,
                    "predicted_ms": predict(cost, dense).step_ms,
                    "composed_ms": predict(of_plan.measured, dense).step_ms,
                    "cost_ms": of_plan.measured.critical_path_ms,
                    "predicted_cost_ms": cost.critical_path_ms,
                    "input_dist_ms": of_plan.measured.input_dist_max_ms,
                    "predicted_input_dist_ms": cost.input_dist_max_ms,
                    "dense_ms": dense.mean_ms,
                    "all_reduce_ms": dense.all_reduce_ms,
                    "spread": dense.by_rank[0].spread,
                    "batch_size": self.task.batch_size,
                    "num_tables": len(self.task.tables),
                }
            )
        return rows

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

    def _dense(self, batches: Sequence[Batch]) -> DensePart:
        times = measure_dense(
            self.build(self.rank.device),
            self.task.tables,
            batches,
            OPTIMIZER,
            time_budget_s=DENSE_BUDGET_S,
        )
        by_rank = [times] * self.rank.world_size
        dist.all_gather_object(by_rank, times)
        all_reduce_ms = measure_all_reduce(times.gradient_bytes, self.rank.device)
        return DensePart(tuple(by_rank), all_reduce_ms)

    def _trained(self, plan: ShardingPlan, batches: Sequence[Batch]) -> _Trained:
        sharded = shard_model(
            self.build(self.rank.device), plan, self.task.tables, self.task.topology, seed=0
        )
        optimizer = OPTIMIZER.build(sharded)
        measured = measure(
            sharded_embeddings(sharded),
            [batch.sparse_features for batch in batches],
            MEASURED,
            replica_optimizer=replica_part(optimizer),
        ).cost

        def loop() -> None:
            Trainer(
                sharded,
                optimizer=optimizer,
                lr_scheduler=LambdaLR(optimizer, OPTIMIZER.schedule.factor),
                train_stream=self._stream("train"),
                eval_stream=self._stream("val"),
                config=TrainerConfig(num_steps=self.steps, num_warmup_steps=0),
                batch_size=self.task.batch_size,
                rank=self.rank,
                log_scalar=lambda tag, value, step: None,
            ).run()

        return _Trained(loop, measured, [])

    def _stream(self, split: Any) -> BatchStream:
        return BatchStream(
            self.dataset, split, rank=self.rank.rank, world_size=self.rank.world_size
        )

    def _batches(self) -> list[Batch]:
        stream = self._stream("train")
        return [next(stream) for _ in range(NUM_BATCHES)]


def _line(number: int, rows: Sequence[dict[str, Any]]) -> str:
    texts = (
        f"{'/'.join(row['sharders'])} {np.median(row['step_ms']):.1f} "
        f"({row['predicted_ms']:.1f}, {row['composed_ms']:.1f})"
        for row in rows
    )
    return f"case {number}: measured (predicted, composed) ms: {', '.join(texts)}"


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print the errors of the predictions, and how often they pick the fastest plan."""
    lines = []
    for key in ("predicted_ms", "composed_ms"):
        logs = np.array([np.log(row[key] / np.median(row["step_ms"])) for row in rows])
        picked, tied, num_cases = _picks(rows, key)
        lines.append(
            [
                key.removesuffix("_ms"),
                f"{100 * np.expm1(np.exp(np.mean(np.log(np.maximum(np.abs(logs), 1e-4))))):.1f}",
                f"{100 * np.expm1(np.mean(np.abs(logs))):.1f}",
                f"{100 * np.expm1(np.mean(logs)):+.1f}",
                f"{picked} and {tied} ties of {num_cases}",
            ]
        )
    noise = np.array([np.ptp(np.log(row["step_ms"])) / 2 for row in rows])
    print(f"{len(rows)} plans, load average {os.getloadavg()[0]:.1f}; rounds of a plan differ by")
    print(f"+-{100 * noise.mean():.1f} % in the mean")
    header = ["prediction", "error %, geometric mean", "mean", "bias %", "fastest plan picked"]
    print(markdown(header, lines), flush=True)


def _picks(rows: Sequence[dict[str, Any]], key: str) -> tuple[int, int, int]:
    """Return in how many cases the plan predicted fastest is so, ties with it, and all cases.

    A tie is a plan that no round shows to be slower than the fastest one.
    """
    by_case: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_case[row["number"]].append(row)
    picked = tied = 0
    for of_case in by_case.values():
        fastest = min(of_case, key=lambda row: np.median(row["step_ms"]))
        chosen = min(of_case, key=lambda row: row[key])
        if chosen is fastest:
            picked += 1
        elif min(chosen["step_ms"]) <= max(fastest["step_ms"]):
            tied += 1
    return picked, tied, len(by_case)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
