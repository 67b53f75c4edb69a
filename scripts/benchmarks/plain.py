"""Training with this project against a plain TorchRec script: same model, batches and processes.

The script is what a user of TorchRec writes after its DLRM example: TorchRec's model, the planner's
plan, fused row-wise Adagrad, and the pipeline that redistributes ids ahead.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks import loop
from benchmarks.planners import planner_of
from benchmarks.training import LEARNING_RATE, NUM_DENSE, Training, dataset_of, new_dlrm, stream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.model.torchrec_adapter import bag_configs
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, detect_topology
from dlrm_sharded.training.trainer import TrainerConfig
from studies.on_ranks import Loop, compared_loops
from studies.study import Case, Row

BASIS = "measured"
BATCH_SIZE = 2048
TABLES = tuple(Table(f"cat_{i}", 100_000, 64, 1.0) for i in range(26))
DENSE_LAYERS = [512, 256, 64]
OVER_LAYERS = [512, 512, 256, 1]

report = loop.report


OPTIONS = loop.loop_options(steps=12, rounds=30)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    return loop.cases(options, __name__)


def rows_on_rank(rank: Rank, *, steps: int, rounds: int) -> list[Row]:
    dataset = dataset_of(TABLES, BATCH_SIZE, steps)
    loops = {"plain": plain(rank, dataset), "dlrm_sharded": trained(rank, dataset, steps)}
    return compared_loops(loops, rank, steps=steps, rounds=rounds)


def plain(rank: Rank, dataset: SyntheticDataset) -> Loop:
    collection = EmbeddingBagCollection(tables=bag_configs(TABLES), device=torch.device("meta"))
    model = DLRMTrain(
        DLRM(collection, NUM_DENSE, DENSE_LAYERS, OVER_LAYERS, dense_device=rank.device)
    )
    wrapped, optimizer = wrapped_plainly(model, rank, batch_size=BATCH_SIZE)

    def train() -> None:
        pipeline = TrainPipelineSparseDist(wrapped, optimizer, rank.device)
        batches = stream(dataset, rank)
        for _ in range(len(batches)):
            pipeline.progress(batches)
        pipeline.detach()

    return train


def wrapped_plainly(
    model: DLRMTrain,
    rank: Rank,
    *,
    batch_size: int,
    constraints: dict[str, ParameterConstraints] | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shard a model by TorchRec's planner, and make its optimizer, as TorchRec's examples do.

    Args:
        constraints: what the planner may do with tables.
    """
    tables = model.model.sparse_arch.embedding_bag_collection.parameters()
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": LEARNING_RATE})
    sharders = [EmbeddingBagCollectionSharder()]
    topology = TorchRecTopology(
        rank.world_size, rank.device.type, local_world_size=rank.local_world_size
    )
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=batch_size // rank.world_size, constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    wrapped = DistributedModelParallel(model, device=rank.device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(wrapped.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=LEARNING_RATE),
    )
    optimizer = CombinedOptimizer([wrapped.fused_optimizer, dense])
    return wrapped, optimizer


def trained(rank: Rank, dataset: SyntheticDataset, steps: int) -> Loop:
    task = ShardingTask(dataset.tables, detect_topology(memory_gib=8), BATCH_SIZE)
    hardware = detect_hardware(rank)
    plan, _ = on_rank_zero(
        lambda: planner_of("neuroshard", device=rank.device.type, hardware=hardware).plan(task)
    )
    model = new_dlrm(task.tables, DENSE_LAYERS, OVER_LAYERS, rank.device)
    training = Training.under(plan, model, task, rank)
    return lambda: training.train(dataset, TrainerConfig(num_steps=steps))
