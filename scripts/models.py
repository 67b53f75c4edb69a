"""A DLRM for the benchmark, built and sharded as in TorchRec's examples, and as in a run here.

Both sides of a comparison have the same layers, tables and optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_sharded import Planner, RunContext, learned_cost_model, make_sharder
from dlrm_sharded.datasets.base import BatchStream, ids_per_sample
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.model.dlrm import dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.model.sharded_model import shard_model
from dlrm_sharded.model.torchrec_adapter import bag_configs
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, detect_topology

TABLES = tuple(Table(f"cat_{i}", 100_000, 64, 1.0) for i in range(26))
NUM_DENSE = 13
DENSE_LAYERS, OVER_LAYERS = (512, 256, 64), (512, 512, 256, 1)
LEARNING_RATE = 0.01
OPTIMIZER = OptimizerConfig(
    embedding="rowwise_adagrad",
    embedding_learning_rate=LEARNING_RATE,
    dense="adagrad",
    dense_learning_rate=LEARNING_RATE,
)
Training = tuple[DistributedModelParallel, CombinedOptimizer]


def batches(batch_size: int, num: int) -> SyntheticDataset:
    """Return a dataset whose batches are all generated before the first one is used."""
    return SyntheticDataset(
        TABLES, batch_size=batch_size, num_train_batches=num, num_val_batches=0, pregenerate=True
    )


def plain_training(rank: Rank, batch_size: int) -> Training:
    """Return TorchRec's model, sharded by its planner, and its optimizers, as in its examples."""
    collection = EmbeddingBagCollection(tables=bag_configs(TABLES), device=torch.device("meta"))
    layers = (list(DENSE_LAYERS), list(OVER_LAYERS))
    train = DLRMTrain(DLRM(collection, NUM_DENSE, *layers, dense_device=rank.device))
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": LEARNING_RATE})
    topology = TorchRecTopology(
        rank.world_size, rank.device.type, local_world_size=rank.local_world_size
    )
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=batch_size // rank.world_size)
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(train, sharders, dist.group.WORLD)
    wrapped = DistributedModelParallel(train, device=rank.device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(wrapped.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=LEARNING_RATE),
    )
    return wrapped, CombinedOptimizer([wrapped.fused_optimizer, dense])


def our_training(rank: Rank, batch_size: int) -> Training:
    """Return the same model as a training run here builds it."""
    task = ShardingTask(TABLES, detect_topology(), batch_size)
    context = RunContext(rank.device.type, detect_hardware(rank))
    cost_model = learned_cost_model(context)
    planner = Planner(make_sharder("search", cost_model, run=context), cost_model)
    plan, _ = on_rank_zero(lambda: planner.plan(task))
    layers = {"dense_layers": DENSE_LAYERS, "over_layers": OVER_LAYERS}
    built = dlrm(TABLES, NUM_DENSE, device=rank.device, **layers)
    OPTIMIZER.fuse_into(built)
    known = ids_per_sample(batches(batch_size, 1))
    sharded = shard_model(built, plan, task.tables, task.topology, seed=0, ids_per_sample=known)
    return sharded, OPTIMIZER.build(sharded)


def stream(dataset: SyntheticDataset, rank: Rank, split: Any = "train") -> BatchStream:
    return BatchStream(dataset, split, rank=rank.rank, world_size=rank.world_size)
