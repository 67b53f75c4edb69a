"""Training under the plans of several sharders, replicated tables among them, on the ranks here.

All plans of a model are trained in one job, in turns and on the same batches. A round measures the
embedding cost of every plan, and the time of a few training steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import warnings
from collections.abc import Sequence

import numpy as np

from benchmarks import on_ranks
from benchmarks.compared import markdown, planner_of, quiet
from benchmarks.plain import Trained, stream, trained_under
from dlrm_sharded.calibration.measure import MeasureConfig, measure
from dlrm_sharded.datasets import presets
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.files.errors import ShardingError
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.model.replicas import replica_part
from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank, detect_topology, on_rank_zero, process_group

SHARDERS = (
    "neuroshard,sharder.replicate=never",
    "neuroshard",
    "neuroshard,sharder.exchange_precision=auto",
    "torchrec",
    "torchrec_dp",
    "hugectr",
    "embark",
)
NUM_BATCHES = 4
MEASURED = MeasureConfig(iterations=8, warmup=2, num_batches=NUM_BATCHES, time_budget_s=1.5)


def capped(tables: Sequence[Table], rows: int, *, dim: int | None = None) -> tuple[Table, ...]:
    """Return the tables with so many rows at most, and so many columns."""
    return tuple(
        dataclasses.replace(
            table,
            num_embeddings=min(table.num_embeddings, rows),
            embedding_dim=dim or table.embedding_dim,
        )
        for table in tables
    )


MODELS: dict[str, tuple[tuple[Table, ...], int]] = {
    "criteo, 16 columns": (capped(presets.criteo_kaggle(16), 1_000_000), 2048),
    "criteo, 64 columns": (capped(presets.criteo_kaggle(64), 200_000), 4096),
    "dcnv2": (capped(presets.mlperf_dcnv2(64), 100_000), 1024),
    "demo": (capped(presets.embedding_demo(), 200_000, dim=64), 2048),
    "t510": (capped(presets.t510(16)[::4], 100_000), 1024),
}
"""Tables and global batch size of each model. All tables of a model have the same width."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_ranks.add_arguments(parser, steps=8, rounds=6)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--sharders", nargs="+", default=list(SHARDERS))


def run(options: argparse.Namespace) -> None:
    """Start the ranks of a job for each model; each runs `main` below."""
    for model in options.models:
        on_ranks.start(__file__, options, model, *options.sharders)


def main(steps: int, rounds: int, model: str, *sharders: str) -> None:
    warnings.simplefilter("ignore")
    quiet()
    with process_group() as rank:
        tables, batch_size = MODELS[model]
        dataset = SyntheticDataset(
            tables,
            batch_size=batch_size,
            num_train_batches=max(steps, NUM_BATCHES),
            num_val_batches=0,
            pregenerate=True,
        )
        task = ShardingTask(dataset.tables, detect_topology(memory_gib=4), batch_size)
        planned = _plans(task, sharders, rank)
        # A plan that several sharders make is trained once.
        distinct = list(dict.fromkeys(plan for plan, _ in planned.values()))
        trained = {plan: trained_under(plan, dataset, task, rank, steps=steps) for plan in distinct}
        times = _times(trained, dataset, rank, steps=steps, rounds=rounds)
        if rank.is_zero:
            _report(model, planned, times, batch_size)


def _plans(
    task: ShardingTask, sharders: Sequence[str], rank: Rank
) -> dict[str, tuple[ShardingPlan, PlanReport]]:
    hardware = detect_hardware(rank)

    def plan_all() -> dict[str, tuple[ShardingPlan, PlanReport]]:
        found = {}
        for sharder in sharders:
            planner = planner_of(sharder, device=rank.device.type, hardware=hardware)
            try:
                found[sharder] = planner.plan(task)
            except ShardingError as error:
                print(f"{sharder}: no plan: {error}")
        return found

    return on_rank_zero(plan_all)


def _times(
    trained: dict[ShardingPlan, Trained],
    dataset: SyntheticDataset,
    rank: Rank,
    *,
    steps: int,
    rounds: int,
) -> dict[ShardingPlan, list[tuple[float, float]]]:
    """Return the embedding cost and the time of a step, in ms, of each plan and round."""
    batches = [
        batch.sparse_features for batch in itertools.islice(stream(dataset, rank), NUM_BATCHES)
    ]
    for of_plan in trained.values():
        of_plan.loop()
    times: dict[ShardingPlan, list[tuple[float, float]]] = {plan: [] for plan in trained}
    order = list(trained)
    for i in range(rounds):
        # Every plan is first and last in turn, so that none gains from the order.
        shift = i % len(order)
        for plan in (order[shift:] + order[:shift])[:: -1 if i % 2 else 1]:
            of_plan = trained[plan]
            cost = measure(
                sharded_embeddings(of_plan.model),
                batches,
                MEASURED,
                replica_optimizer=replica_part(of_plan.optimizer),
            ).cost
            step_ms = 1e3 * on_ranks.timed(of_plan.loop, rank) / steps
            times[plan].append((cost.cost_ms, step_ms))
    return times


def _report(
    model: str,
    planned: dict[str, tuple[ShardingPlan, PlanReport]],
    times: dict[ShardingPlan, list[tuple[float, float]]],
    batch_size: int,
) -> None:
    first = np.array(times[next(iter(planned.values()))[0]])
    lines: list[list[object]] = []
    for sharder, (plan, report) in planned.items():
        assert report.cost is not None
        found = np.array(times[plan])
        cost_ms, step_ms = np.median(found, axis=0)
        low, ratio, high = np.percentile(found / first, [25, 50, 75], axis=0)
        lines.append(
            [
                sharder,
                len(plan.replicated_tables),
                plan.exchange_precision,
                f"{report.cost.cost_ms:.2f}",
                f"{cost_ms:.2f}",
                f"{ratio[0]:.3f} ({low[0]:.3f} to {high[0]:.3f})",
                f"{1e3 * batch_size / step_ms:,.0f}",
                f"{ratio[1]:.3f} ({low[1]:.3f} to {high[1]:.3f})",
            ]
        )
    header = ["sharder", "replicas", "exchanges", "predicted, ms", "measured, ms"]
    header += ["relative to the first (quartiles)", "samples/s", "step relative to the first"]
    print(f"\n{model}: {len(times)} different plans, load average {os.getloadavg()[0]:.1f}\n")
    print(markdown(header, lines), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
