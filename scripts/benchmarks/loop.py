"""The trainer's loop against a bare loop: same wrapped model, same batches, same processes."""

from __future__ import annotations

import argparse
import sys

from torch.optim.lr_scheduler import LambdaLR

from benchmarks import on_ranks
from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.presets import embedding_demo
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.model.dlrm import dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.model.sharded_model import shard_model
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank, detect_topology, process_group
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.training.trainer import Trainer, TrainerConfig

BATCH_SIZE = 2048


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_ranks.add_arguments(parser, steps=140, rounds=6)


def run(options: argparse.Namespace) -> None:
    """Start the ranks; each runs `main` below."""
    on_ranks.start(__file__, options)


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

    on_ranks.compare({"bare": bare, "trainer": trained}, rank, steps=steps, rounds=rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
