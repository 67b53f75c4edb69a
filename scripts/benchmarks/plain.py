"""Training with this project against a plain TorchRec script: same model, batches and processes.

The script is what a user of TorchRec writes after its DLRM example: TorchRec's model, the planner's
plan, fused row-wise Adagrad, and the pipeline that redistributes ids ahead.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks import on_ranks
from benchmarks.compared import planner_of, quiet
from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.model.dlrm import dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.model.sharded_model import shard_model
from dlrm_sharded.model.torchrec_adapter import bag_configs
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank, detect_topology, on_rank_zero, process_group
from dlrm_sharded.training.trainer import Trainer, TrainerConfig

BATCH_SIZE = 2048
NUM_DENSE = 13
TABLES = tuple(Table(f"cat_{i}", 100_000, 64, 1.0) for i in range(26))
DENSE_LAYERS = [512, 256, 64]
OVER_LAYERS = [512, 512, 256, 1]
LEARNING_RATE = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    on_ranks.add_arguments(parser, steps=12, rounds=30)


def run(options: argparse.Namespace) -> None:
    """Start the ranks; each runs `main` below."""
    on_ranks.start(__file__, options)


def main(steps: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    quiet()
    with process_group() as rank:
        dataset = SyntheticDataset(
            TABLES,
            batch_size=BATCH_SIZE,
            num_train_batches=steps,
            num_val_batches=0,
            pregenerate=True,
        )
        loops = {"plain": plain(rank, dataset), "dlrm_sharded": trained(rank, dataset, steps)}
        on_ranks.compare(loops, rank, steps=steps, rounds=rounds)


def plain(rank: Rank, dataset: SyntheticDataset) -> on_ranks.Loop:
    collection = EmbeddingBagCollection(tables=bag_configs(TABLES), device=torch.device("meta"))
    model = DLRMTrain(
        DLRM(collection, NUM_DENSE, DENSE_LAYERS, OVER_LAYERS, dense_device=rank.device)
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": LEARNING_RATE})
    sharders = [EmbeddingBagCollectionSharder()]
    topology = TorchRecTopology(
        rank.world_size, rank.device.type, local_world_size=rank.local_world_size
    )
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH_SIZE // rank.world_size)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    wrapped = DistributedModelParallel(model, device=rank.device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(wrapped.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=LEARNING_RATE),
    )
    optimizer = CombinedOptimizer([wrapped.fused_optimizer, dense])

    def loop() -> None:
        pipeline = TrainPipelineSparseDist(wrapped, optimizer, rank.device)
        batches = stream(dataset, rank)
        for _ in range(len(batches)):
            pipeline.progress(batches)
        pipeline.detach()

    return loop


def trained(rank: Rank, dataset: SyntheticDataset, steps: int) -> on_ranks.Loop:
    topology = detect_topology(memory_gib=8)
    task = ShardingTask(dataset.tables, topology, BATCH_SIZE)
    hardware = detect_hardware(rank)
    plan, _ = on_rank_zero(
        lambda: planner_of("neuroshard", device=rank.device.type, hardware=hardware).plan(task)
    )
    return trained_under(plan, dataset, task, rank, steps=steps).loop


@dataclass(frozen=True, slots=True)
class Trained:
    """A sharded model with its optimizer, and a loop that trains it for some steps."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    loop: on_ranks.Loop


def trained_under(
    plan: ShardingPlan, dataset: SyntheticDataset, task: ShardingTask, rank: Rank, *, steps: int
) -> Trained:
    """Shard the model by a plan; a collective of all ranks."""
    model = dlrm(
        task.tables,
        NUM_DENSE,
        dense_layers=[*DENSE_LAYERS[:-1], task.tables[0].embedding_dim],
        over_layers=OVER_LAYERS,
        device=rank.device,
    )
    config = OptimizerConfig(
        embedding="rowwise_adagrad",
        embedding_learning_rate=LEARNING_RATE,
        dense="adagrad",
        dense_learning_rate=LEARNING_RATE,
    )
    config.fuse_into(model)
    sharded = shard_model(model, plan, task.tables, task.topology, seed=0)
    optimizer = config.build(sharded)

    def loop() -> None:
        Trainer(
            sharded,
            optimizer=optimizer,
            lr_scheduler=LambdaLR(optimizer, config.schedule.factor),
            train_stream=stream(dataset, rank),
            eval_stream=BatchStream(dataset, "val", rank=rank.rank, world_size=rank.world_size),
            config=TrainerConfig(num_steps=steps),
            batch_size=task.batch_size,
            rank=rank,
            log_scalar=lambda tag, value, step: None,
        ).run()

    return Trained(sharded, optimizer, loop)


def stream(dataset: SyntheticDataset, rank: Rank) -> BatchStream:
    return BatchStream(dataset, "train", rank=rank.rank, world_size=rank.world_size)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
