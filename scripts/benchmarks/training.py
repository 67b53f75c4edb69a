"""A sharded DLRM with its optimizer, and loops that train it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_sharded.datasets.base import BatchStream, Dataset
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.model.dlrm import Dlrm, dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.model.sharded_model import shard_model
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.trainer import Trainer, TrainerConfig, TrainingResult

NUM_DENSE = 13
LEARNING_RATE = 0.01
OPTIMIZER = OptimizerConfig(
    embedding="rowwise_adagrad",
    embedding_learning_rate=LEARNING_RATE,
    dense="adagrad",
    dense_learning_rate=LEARNING_RATE,
)


def new_dlrm(
    tables: Sequence[Table], dense_layers: Sequence[int], over_layers: Sequence[int], device: Any
) -> Dlrm:
    """Return a model whose tables have a fused optimizer."""
    model = dlrm(
        tables,
        NUM_DENSE,
        dense_layers=list(dense_layers),
        over_layers=list(over_layers),
        device=device,
    )
    OPTIMIZER.fuse_into(model)
    return model


def dataset_of(tables: Sequence[Table], batch_size: int, num_batches: int) -> SyntheticDataset:
    """Return batches that are generated before the first one is used."""
    return SyntheticDataset(
        tables,
        batch_size=batch_size,
        num_train_batches=num_batches,
        num_val_batches=0,
        pregenerate=True,
    )


def stream(dataset: Dataset, rank: Rank, split: Any = "train", **options: Any) -> BatchStream:
    return BatchStream(dataset, split, rank=rank.rank, world_size=rank.world_size, **options)


@dataclass(frozen=True, slots=True)
class Training:
    """A sharded model and what trains it."""

    sharded: DistributedModelParallel
    optimizer: CombinedOptimizer
    config: OptimizerConfig
    rank: Rank

    @classmethod
    def under(
        cls,
        plan: ShardingPlan,
        model: Dlrm,
        task: ShardingTask,
        rank: Rank,
        config: OptimizerConfig = OPTIMIZER,
    ) -> Training:
        """Shard a model by a plan; a collective of all ranks."""
        sharded = shard_model(model, plan, task.tables, task.topology, seed=0)
        return cls(sharded, config.build(sharded), config, rank)

    def train(
        self,
        dataset: Dataset,
        config: TrainerConfig,
        *,
        log_scalar: Callable[[str, float, int], None] = lambda tag, value, step: None,
        **options: Any,
    ) -> TrainingResult:
        """Train for some steps.

        Args:
            options: of the stream of training batches.
        """
        return Trainer(
            self.sharded,
            optimizer=self.optimizer,
            lr_scheduler=LambdaLR(self.optimizer, self.config.schedule.factor),
            train_stream=stream(dataset, self.rank, **options),
            eval_stream=stream(dataset, self.rank, "val"),
            config=config,
            batch_size=dataset.batch_size,
            rank=self.rank,
            log_scalar=log_scalar,
        ).run()

    def train_bare(self, dataset: Dataset) -> None:
        """Train on all batches without a trainer."""
        for batch in stream(dataset, self.rank):
            on_device = batch.to(self.rank.device)
            self.optimizer.zero_grad()
            loss, _ = self.sharded(on_device)
            loss.backward()
            self.optimizer.step()
