"""The trainer's loop against a bare loop: same wrapped model, same batches, same processes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.presets import embedding_demo
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.distributed import Rank, detect_topology, process_group
from dlrm_sharded.model import dlrm
from dlrm_sharded.sharded_model import shard_model
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.task import ShardingTask
from dlrm_sharded.training.optimizers import OptimizerConfig
from dlrm_sharded.training.trainer import Trainer, TrainerConfig

BATCH_SIZE = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=140, help="steps of one loop in one round [%(default)s]"
    )
    parser.add_argument("--rounds", type=int, default=6)


def run(options: argparse.Namespace) -> None:
    """Start the ranks; each runs `main` below."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(options.ranks), str(Path(__file__).resolve())]
    arguments = [str(options.steps), str(options.rounds)]
    subprocess.run([*command, *arguments], env={"OMP_NUM_THREADS": "1", **os.environ}, check=True)


def main(steps: int, rounds: int) -> None:
    with process_group() as rank:
        compare(rank, steps, rounds)


def compare(rank: Rank, steps: int, rounds: int) -> None:
    dataset = SyntheticDataset(
        embedding_demo(),
        batch_size=BATCH_SIZE,
        num_train_batches=steps,
        num_val_batches=0,
        pregenerate=True,
    )
    topology = detect_topology(memory_gib=4)
    plan = GreedySharder("size_lookup").shard(ShardingTask(embedding_demo(), topology, BATCH_SIZE))
    model = dlrm(
        embedding_demo(), 13, dense_layers=[64, 16], over_layers=[64, 1], device=rank.device
    )
    config = OptimizerConfig(
        embedding="rowwise_adagrad",
        embedding_learning_rate=0.01,
        dense="adagrad",
        dense_learning_rate=0.01,
    )
    config.fuse_into(model)
    sharded = shard_model(model, plan, embedding_demo(), topology, seed=0)
    optimizer = config.build(sharded)

    def stream(split: str) -> BatchStream:
        assert split in ("train", "val")
        return BatchStream(dataset, split, rank=rank.rank, world_size=rank.world_size)  # type: ignore[arg-type]

    def bare() -> None:
        for batch in stream("train"):
            on_device = batch.to(rank.device)
            optimizer.zero_grad()
            loss, _ = sharded(on_device)
            loss.backward()
            optimizer.step()

    def trained() -> None:
        Trainer(
            sharded,
            optimizer=optimizer,
            lr_scheduler=LambdaLR(optimizer, config.schedule.factor),
            train_stream=stream("train"),
            eval_stream=stream("val"),
            config=TrainerConfig(num_steps=steps, pipeline="base"),
            batch_size=BATCH_SIZE,
            rank=rank,
            log_scalar=lambda tag, value, step: None,
        ).run()

    bare()
    ratios = []
    for i in range(rounds):
        # Each loop goes first in every other round, so that neither gains from the order.
        order = (bare, trained) if i % 2 else (trained, bare)
        seconds = {loop: timed(loop, rank) for loop in order}
        ratios.append(seconds[trained] / seconds[bare])
        if rank.is_zero:
            print(
                f"bare {1e3 * seconds[bare] / steps:7.2f} ms a step, "
                f"trainer {1e3 * seconds[trained] / steps:7.2f} ms, ratio {ratios[-1]:.4f}",
                flush=True,
            )
    if rank.is_zero:
        low, median, high = np.percentile(ratios, [25, 50, 75])
        print(
            f"trainer / bare: median {median:.4f}, quartiles {low:.4f} to {high:.4f}, "
            f"{rounds} rounds of {steps} steps"
        )


def timed(loop: Callable[[], None], rank: Rank) -> float:
    dist.barrier()
    started = time.perf_counter()
    loop()
    if rank.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
