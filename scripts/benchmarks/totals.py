"""Which total of the stages predicts a step better: the embedding cost or the critical path.

The same tables under many plans, from balanced to one-sided, also with tables that are dear in the
forward pass apart from those that are dear in the backward pass; each plan is measured and trained.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.calibration.measure import MeasureConfig, measure
from dlrm_sharded.context import RunContext
from dlrm_sharded.cost.learned import learned_cost_model
from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.distributed import Rank, detect_topology, on_rank_zero, process_group
from dlrm_sharded.model import dlrm, shard_model, sharded_embeddings
from dlrm_sharded.plan import Shard, ShardingPlan
from dlrm_sharded.provenance import device_name
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask
from dlrm_sharded.training.optimizers import OptimizerConfig
from dlrm_sharded.training.trainer import Trainer, TrainerConfig

BATCH_SIZE = 2048
TABLES = (
    *(Table(f"hot_{i}", 300, 64, 120.0) for i in range(8)),
    *(Table(f"cold_{i}", 400_000, 16, 55.0) for i in range(8)),
)
"""Half of them in the caches, with a cheap backward pass; half of them far larger than those."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("--steps", type=int, default=60)


def run(options: argparse.Namespace) -> None:
    """Start the ranks; each runs `main` below."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(options.ranks), str(Path(__file__).resolve())]
    arguments = [str(options.plans), str(options.steps)]
    subprocess.run([*command, *arguments], env={"OMP_NUM_THREADS": "1", **os.environ}, check=True)


def main(num_plans: int, num_steps: int) -> None:
    with process_group() as rank:
        dataset = SyntheticDataset(
            TABLES,
            batch_size=BATCH_SIZE,
            num_train_batches=num_steps,
            num_val_batches=0,
            pregenerate=True,
        )
        rows = []
        for i in range(num_plans):
            rows.append(measured_and_trained(rank, dataset, random_plan(rank.world_size, i)))
            if rank.is_zero:
                print(("cost {:6.2f} {:6.2f} predicted, path {:6.2f} {:6.2f} predicted, "
                       "step {:6.2f} ms").format(*rows[-1]), flush=True)  # fmt: skip
        if rank.is_zero:
            report(np.array(rows))


def random_plan(world_size: int, seed: int) -> ShardingPlan:
    """Hot tables on one rank and cold ones on another: some, most, or nearly all of them."""
    rng = np.random.default_rng(seed)
    share_at_home = (0.0, 0.6, 0.95)[seed % 3]
    shards = []
    for table in TABLES:
        is_hot = table.name.startswith("hot")
        home = 0 if is_hot else world_size - 1
        stays = rng.random() < share_at_home
        shards.append(Shard.whole(table, home if stays else int(rng.integers(world_size))))
    return ShardingPlan(world_size, tuple(shards))


def measured_and_trained(
    rank: Rank, dataset: SyntheticDataset, plan: ShardingPlan
) -> tuple[float, float, float, float, float]:
    """Embedding cost, measured and predicted, critical path likewise, and step, in ms."""
    topology = detect_topology(memory_gib=4)
    task = ShardingTask(dataset.tables, topology, BATCH_SIZE)
    model = dlrm(task.tables, 13, dense_layers=[64, 16], over_layers=[64, 1], device=rank.device)
    config = OptimizerConfig(
        embedding="rowwise_adagrad",
        embedding_learning_rate=0.01,
        dense="adagrad",
        dense_learning_rate=0.01,
    )
    config.fuse_into(model)
    sharded = shard_model(model, plan, task.tables, topology, seed=0)
    optimizer = config.build(sharded)
    batches = [
        dataset.batch("train", i, rank=rank.rank, world_size=rank.world_size).to(rank.device)
        for i in range(4)
    ]
    measured = measure(
        sharded_embeddings(sharded), [b.sparse_features for b in batches], MeasureConfig()
    ).cost
    streams = [
        BatchStream(dataset, split, rank=rank.rank, world_size=rank.world_size)
        for split in ("train", "val")
    ]
    result = Trainer(
        sharded,
        optimizer=optimizer,
        lr_scheduler=LambdaLR(optimizer, config.schedule.factor),
        train_stream=streams[0],
        eval_stream=streams[1],
        config=TrainerConfig(num_warmup_steps=5),
        batch_size=BATCH_SIZE,
        rank=rank,
        log_scalar=lambda tag, value, step: None,
    ).run()
    predicted = on_rank_zero(
        lambda: learned_cost_model(
            RunContext(device=rank.device.type, hardware=device_name(rank.device))
        ).predict(plan, task)
    )
    return (
        measured.cost_ms,
        predicted.cost_ms,
        measured.critical_path_ms,
        predicted.critical_path_ms,
        result.step_ms,
    )


def report(rows: NDArray[np.float64]) -> None:
    """How well each total orders the plans, and says their step times through a straight line.

    Args:
        rows: [plans, 5], as `measured_and_trained` gives them.
    """
    steps = rows[:, 4]
    names = ("cost, measured", "cost, predicted", "path, measured", "path, predicted")
    print(f"{len(rows)} plans, steps of {steps.min():.1f} to {steps.max():.1f} ms")
    for name, totals in zip(names, rows.T, strict=False):
        errors = []
        for left_out in range(len(rows)):
            others = np.arange(len(rows)) != left_out
            slope, offset = np.polyfit(totals[others], steps[others], 1)
            errors.append(abs(slope * totals[left_out] + offset - steps[left_out]))
        print(
            f"{name:16} Spearman {spearmanr(totals, steps)[0]:.3f}, error of a line, one plan left "
            f"out: mean {np.mean(errors):.2f} ms ({100 * np.mean(errors / steps):.1f} %), "
            f"root mean square {np.sqrt(np.mean(np.square(errors))):.2f} ms"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
