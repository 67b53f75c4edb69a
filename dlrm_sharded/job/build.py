"""Builds the sharded model of a run, and loads the state from which the run begins."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_sharded.checkpoint.model_state import ModelState, model_state
from dlrm_sharded.checkpoint.restore import load_model, load_weights
from dlrm_sharded.datasets.base import BatchStream, Split, ids_per_sample
from dlrm_sharded.job.choose_plan import Planned
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.model.dlrm import warn_of_slow_bf16
from dlrm_sharded.model.fused_lookups import set_fused_steps
from dlrm_sharded.model.sharded_model import dry_shard_model, shard_model
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.ranks.agreement import all_or_none
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.progress import Progress, read_progress
from dlrm_sharded.training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """The sharded model, its optimizer, and the state that goes into checkpoints."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    state: ModelState

    def trainer(
        self,
        settings: JobSettings,
        rank: Rank,
        streams: Mapping[Split, BatchStream],
        **further: Any,
    ) -> Trainer:
        """Return the model's trainer; `further` are other arguments of `Trainer`."""
        return Trainer(
            self.model,
            optimizer=self.optimizer,
            lr_scheduler=LambdaLR(self.optimizer, settings.optimizer.schedule.factor),
            train_stream=streams["train"],
            eval_stream=streams["val"],
            batch_size=settings.batch_size,
            rank=rank,
            **further,
        )


def build(settings: JobSettings, rank: Rank, plan: ShardingPlan, task: ShardingTask) -> Built:
    """Build the model with its initial weights and shard it; a collective of all ranks."""
    with all_or_none():
        model = settings.build_model(task, rank.device)
        if rank.is_zero:
            warn_of_slow_bf16(model, rank.device)
    sharded = shard_model(
        model,
        plan,
        task.tables,
        task.topology,
        seed=settings.seed,
        ids_per_sample=ids_per_sample(settings.dataset),
    )
    optimizer = settings.optimizer.build(sharded)
    state = model_state(
        sharded, optimizer, plan, task.tables, embedding_optimizer=settings.optimizer.embedding
    )
    return Built(sharded, optimizer, state)


def build_dry(prepared: Prepared, planned: Planned) -> float:
    """Build the sharded model without memory for it; return nan, the objective of a dry run."""
    task = planned.task
    with all_or_none():
        model = prepared.settings.build_model(task, torch.device("meta"))
        sharded = dry_shard_model(model, planned.plan, task.tables, task.topology)
    if prepared.rank.is_zero:
        log.info(
            "dry run: rank 0 builds %.2f GiB of parameters; plan and memory are in %s",
            sum(parameter.nbytes for parameter in sharded.parameters()) / GIB,
            prepared.folder.path,
        )
    return math.nan


def resume(prepared: Prepared, planned: Planned, built: Built) -> Progress:
    """Load the checkpoint or weights from which a run begins; return the progress to continue from.

    Until its checkpoint is read, the folder of an interrupted run stays unchanged.
    """
    start = prepared.start
    if start.weights is not None:
        load_weights(start.weights, built.state)
    if start.resumed is None:
        return Progress()
    load_model(start.resumed, built.state)
    set_fused_steps(built.model, start.step)
    with all_or_none():
        progress = read_progress(start.resumed, prepared.rank, same_plan=not planned.is_new)
    if start.own_state is None:  # the best checkpoint is another run's
        progress = dataclasses.replace(progress, best=None)
    return progress
