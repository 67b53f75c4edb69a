"""Builds the sharded model of a run."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_sharded.checkpoint.model_state import ModelState, model_state
from dlrm_sharded.job.plan import Planned
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.model.dlrm import warn_of_slow_bf16
from dlrm_sharded.model.sharded_model import dry_shard_model, shard_model
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.ranks.agreement import all_or_none
from dlrm_sharded.ranks.distributed import Rank

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """The sharded model, with its optimizer and the state that checkpoints hold."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    state: ModelState


def build(prepared: Prepared, planned: Planned) -> Built:
    """Build the model with its first weights and shard it; a collective of all ranks."""
    return build_sharded(prepared.settings, prepared.rank, planned.plan, planned.task)


def build_sharded(
    settings: JobSettings, rank: Rank, plan: ShardingPlan, task: ShardingTask
) -> Built:
    """Build the model of some settings under a plan of a task; a collective of all ranks."""
    with all_or_none():
        model = settings.build_model(task, rank.device)
        if rank.is_zero:
            warn_of_slow_bf16(model, rank.device)
    sharded = shard_model(model, plan, task.tables, task.topology, seed=settings.seed)
    optimizer = settings.optimizer.build(sharded)
    state = model_state(
        sharded, optimizer, plan, task.tables, embedding_optimizer=settings.optimizer.embedding
    )
    return Built(sharded, optimizer, state)


def build_dry(prepared: Prepared, planned: Planned) -> float:
    """Build the sharded model without its memory; a run without training has no objective."""
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
