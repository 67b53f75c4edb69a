"""DLRMs for the benchmarks, built and sharded as in TorchRec's examples, and as in a run here.

Both sides of a comparison have the same layers, tables and optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_sharded import Planner, RunContext, learned_cost_model, make_sharder
from dlrm_sharded.datasets.base import BatchStream, ids_per_sample
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.hardware.detect import detect_hardware
from dlrm_sharded.model.dlrm import dlrm, dlrm_dcnv2
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.model.sharded_model import shard_model
from dlrm_sharded.model.torchrec_adapter import bag_configs
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.agreement import on_rank_zero
from dlrm_sharded.ranks.distributed import Rank, detect_topology

SHARDER = "search"
NUM_DENSE = 13
LEARNING_RATE = 0.01
OPTIMIZER = OptimizerConfig(
    embedding="rowwise_adagrad",
    embedding_learning_rate=LEARNING_RATE,
    dense="adagrad",
    dense_learning_rate=LEARNING_RATE,
)


@dataclass(frozen=True, slots=True)
class Model:
    """A DLRM that both sides train; with cross layers, it is DLRM-DCNv2 in bfloat16.

    Args:
        cross: number and rank of the cross layers.
    """

    tables: tuple[Table, ...]
    dense_layers: tuple[int, ...]
    over_layers: tuple[int, ...]
    cross: tuple[int, int] | None = None

    def batches(self, batch_size: int, num: int) -> SyntheticDataset:
        """Return a dataset whose batches are all generated before the first one is used."""
        return SyntheticDataset(
            self.tables,
            batch_size=batch_size,
            num_train_batches=num,
            num_val_batches=0,
            pregenerate=True,
        )


FULL = Model(
    tuple(Table(f"cat_{i}", 100_000, 64, 1.0) for i in range(26)),
    (512, 256, 64),
    (512, 512, 256, 1),
)
TINY = Model(
    tuple(Table(f"cat_{i}", 100, 4, 1.0) for i in range(26)), (4, 4, 4), (4, 4, 4, 4, 1), (3, 4)
)
Training = tuple[DistributedModelParallel, CombinedOptimizer]


class Bfloat16Train(DLRMTrain):
    """TorchRec's model with its loss, under autocast as a user would write it."""

    def __init__(self, model: DLRM_DCN, device: torch.device) -> None:
        super().__init__(model)
        self.device_type = device.type

    def forward(self, batch: Batch) -> Any:
        with torch.autocast(self.device_type, torch.bfloat16):
            return super().forward(batch)


def plain_training(model: Model, rank: Rank, batch_size: int) -> Training:
    """Return TorchRec's model, sharded by its planner, and its optimizers, as in its examples."""
    collection = EmbeddingBagCollection(
        tables=bag_configs(model.tables), device=torch.device("meta")
    )
    layers = (list(model.dense_layers), list(model.over_layers))
    constraints = None
    if model.cross is None:
        dlrm_model = DLRM(collection, NUM_DENSE, *layers, dense_device=rank.device)
        train = DLRMTrain(dlrm_model)
    else:
        # whole tables on both sides, so that both run the same operators
        constraints = {t.name: ParameterConstraints(["table_wise"]) for t in model.tables}
        dcn = DLRM_DCN(collection, NUM_DENSE, *layers, *model.cross, dense_device=rank.device)
        train = Bfloat16Train(dcn, rank.device)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": LEARNING_RATE})
    topology = TorchRecTopology(
        rank.world_size, rank.device.type, local_world_size=rank.local_world_size
    )
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=batch_size // rank.world_size, constraints=constraints
    )
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(train, sharders, dist.group.WORLD)
    wrapped = DistributedModelParallel(train, device=rank.device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(wrapped.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=LEARNING_RATE),
    )
    return wrapped, CombinedOptimizer([wrapped.fused_optimizer, dense])


def our_training(
    model: Model, rank: Rank, batch_size: int, sharder: str = SHARDER, **options: Any
) -> Training:
    """Return the same model as a training run here builds it.

    Args:
        options: other options of the model, such as `compile_mode`.
    """
    task = ShardingTask(model.tables, detect_topology(), batch_size)
    context = RunContext(rank.device.type, detect_hardware(rank))
    cost_model = learned_cost_model(context)
    planner = Planner(make_sharder(sharder, cost_model, run=context), cost_model)
    plan, _ = on_rank_zero(lambda: planner.plan(task))
    options |= {"dense_layers": model.dense_layers, "over_layers": model.over_layers}
    if model.cross is None:
        built = dlrm(model.tables, NUM_DENSE, device=rank.device, **options)
    else:
        num, cross_rank = model.cross
        options |= {"num_cross_layers": num, "cross_rank": cross_rank, "bf16": True}
        built = dlrm_dcnv2(model.tables, NUM_DENSE, device=rank.device, **options)
    OPTIMIZER.fuse_into(built)
    known = ids_per_sample(model.batches(batch_size, 1))
    sharded = shard_model(built, plan, task.tables, task.topology, seed=0, ids_per_sample=known)
    return sharded, OPTIMIZER.build(sharded)


def stream(dataset: SyntheticDataset, rank: Rank, split: Any = "train") -> BatchStream:
    return BatchStream(dataset, split, rank=rank.rank, world_size=rank.world_size)
