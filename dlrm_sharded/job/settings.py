"""The settings of a run: the objects that its config describes, and its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dlrm_sharded.datasets.base import BatchStream, Dataset, Split
from dlrm_sharded.measuring.measure import MeasureConfig
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.plans.validation import check_pooled
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.planning import PlannerFactory
from dlrm_sharded.training.trainer import TrainerConfig


@dataclass(frozen=True)
class JobSettings:
    """Settings of a run, which are the same on all ranks.

    Args:
        topology: the ranks; their memory may not be known yet.
        new_model: builds the model from tables, the number of dense features and a device.
        planner: makes the planner of the run on rank 0, once the hardware is known.
        journal: where measured runs, which correct predictions, are: "auto", a folder, or None.
        cost_model_snapshot: folder of the cost model that a sweep's runs share; they extend the
            journal only when all of them have ended. None without a sweep.
        start_budget_s: time for the first measurement of the hardware, in s; None for none.
        resume: "auto", "never", the path of a checkpoint, or None for "auto" after a restart.
        init_from: checkpoint or run from which initial weights are taken; None for none.
        bounds: what to do about ids beyond a table's rows, one of `id_check.BOUNDS`.
        objective: key of result.json whose value a run returns.
        check_memory: whether a plan that does not fit the memory is refused.
        dry_run: whether the run ends when its plan and memory are known.
        config: the config in JSON types, as checkpoints and TensorBoard record it.
        config_files: contents of the files that the run writes when it begins, by path.
    """

    dataset: Dataset
    topology: Topology
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    measure: MeasureConfig
    batch_size: int
    seed: int
    new_model: Callable[..., Dlrm]
    planner: PlannerFactory
    journal: str | None
    cost_model_snapshot: str | None
    start_budget_s: float | None
    resume: object
    init_from: object
    bounds: str
    objective: str
    check_memory: bool
    dry_run: bool
    config: Mapping[str, Any]
    config_files: Mapping[str, str]

    def task(self, topology: Topology) -> ShardingTask:
        """Return the task to plan, for ranks whose memory is known.

        Raises:
            ConfigError: a table is a sequence, which the DLRM does not support.
        """
        tables = self.dataset.tables
        check_pooled(
            tables,
            "the model of dlrm-train pools all of its tables; plan such data with dlrm-plan, and "
            "train a model of your own with ShardedPlanner (docs/guide/torchrec.md)",
        )
        return ShardingTask(tables, topology, self.batch_size, self.optimizer.embedding)

    def stream(self, split: Split, rank: Rank, *, shuffled: bool = False) -> BatchStream:
        """Return the batches of a rank; their ids are checked according to `bounds`."""
        return BatchStream(
            self.dataset,
            split,
            rank=rank.rank,
            world_size=rank.world_size,
            shuffle_seed=self.seed if shuffled else None,
            bounds=self.bounds,
        )

    def build_model(self, task: ShardingTask, device: torch.device) -> Dlrm:
        """Build the model on a device, with the tables' optimizer, before it is sharded."""
        torch.manual_seed(self.seed)
        model = self.new_model(task.tables, self.dataset.num_dense, device=device)
        self.optimizer.fuse_into(model)
        return model
