"""Pipelines that a trainer calls for the batches of a step and of an evaluation."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    TrainPipeline,
    TrainPipelineSparseDist,
    train_pipelines,
)
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.model.compiled import uncompiled
from dlrm_sharded.model.dense_graph import DenseGraph
from dlrm_sharded.model.fused_lookups import fused_steps_kept, set_fused_steps
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.training.metrics import Evaluation, Evaluator
from dlrm_sharded.training.pipelines import PIPELINES

CLASSES = {
    "base": "TrainPipelineBase",
    "sparse_dist": "TrainPipelineSparseDist",
    "sparse_dist_lite": "TrainPipelineSparseDistLite",
    "fused_sparse_dist": "TrainPipelineFusedSparseDist",
    "semi_sync": "TrainPipelineSemiSync",
}
"""TorchRec's classes by the name of the pipeline. All versions from 1.6 to 1.9 have them."""

NEED_STREAMS = ("fused_sparse_dist", "semi_sync")
"""Pipelines that TorchRec has for devices with streams only."""

StepPipeline: TypeAlias = TrainPipeline[Batch, tuple[Tensor, Tensor, Tensor]]

log = logging.getLogger(__name__)


def set_schedule_step(scheduler: LRScheduler, step: int) -> None:
    """Set the learning rates to those of a step, as if the scheduler had taken all steps before."""
    if step == 0:
        return
    scheduler.last_epoch = step - 1
    with warnings.catch_warnings():  # the optimizer has not taken a step in this process
        warnings.simplefilter("ignore", UserWarning)
        scheduler.step()


def check_pipeline(name: str, plan: ShardingPlan, device_type: str) -> None:
    """Refuse a pipeline that is not installed, or that would train a plan's tables incorrectly.

    Raises:
        ConfigError: says which pipeline trains the plan, or which TorchRec has the pipeline.
    """
    _class_of(name)
    if name in NEED_STREAMS and device_type == "cpu":
        raise ConfigError(
            f"trainer.pipeline={name} needs the streams of a GPU; take base or sparse_dist on a CPU"
        )
    if PIPELINES[name].next_lookup and any(shard.replicated for shard in plan.shards):
        raise ConfigError(
            f"trainer.pipeline={name} looks up the next vectors while the optimizer "
            "updates replicated tables, and the plan has some; take sparse_dist, or a plan without "
            "replicas"
        )


def make_pipeline(
    name: str,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    device: torch.device,
    num_synchronous: int = 0,
) -> StepPipeline:
    """Make a pipeline of `PIPELINES`.

    Args:
        num_synchronous: number of first steps in which `semi_sync` does not look up vectors early.

    Raises:
        ConfigError: the pipeline is not installed, or would train the model incorrectly.
    """
    if not PIPELINES[name].is_exact and any(isinstance(m, DenseGraph) for m in model.modules()):
        raise ConfigError(
            f"trainer.pipeline={name} updates tables while the next step is under way, whose "
            "model.dense_graph overwrites their gradients; take sparse_dist"
        )
    make = _class_of(name)
    if not PIPELINES[name].is_exact:
        log.info(
            "trainer.pipeline=%s: after trainer.semi_sync_after steps, the vectors of a step are "
            "looked up before the tables' update of the step before, so losses are not those of "
            "base",
            name,
        )
    if PIPELINES[name].next_lookup:
        make = _with_current_rates(make)
    options = {"start_batch": num_synchronous} if name == "semi_sync" else {}
    made: StepPipeline = make(model, optimizer, device, **options)
    return made


def _with_current_rates(pipeline: type[Any]) -> type[Any]:
    """Set the tables' learning rates at the start of a step, for the lookups in that step.

    FBGEMM updates rows at the learning rate it had when they were looked up. TorchRec passes the
    rate on in `zero_grad`, which it calls too late for these pipelines.
    """

    class WithCurrentRates(pipeline):
        def progress(self, batches: Iterator[Batch]) -> Any:
            self._optimizer.zero_grad()
            return super().progress(batches)

    return WithCurrentRates


def _class_of(name: str) -> type[Any]:
    found: type[Any] | None = getattr(train_pipelines, CLASSES[name], None)
    if found is None:
        raise ConfigError(
            f"trainer.pipeline={name} needs TorchRec's {CLASSES[name]}, which torchrec "
            f"{version('torchrec')} does not have; torchrec 1.6 to 1.9 have it"
        )
    return found


def settle(name: str, pipeline: StepPipeline, device: torch.device, step: int) -> None:
    """Prepare a pipeline for a checkpoint after a step; a collective of all ranks.

    A resumed run looks up the next vectors in the checkpoint's weights. If this run has looked them
    up already, before the last update, it looks them up again, so that both train alike.
    """
    _wait_for_updates(pipeline, device)
    batches: Any = getattr(pipeline, "batches", ())
    if PIPELINES[name].is_exact or not batches:
        return
    ahead: Any = pipeline
    set_fused_steps(ahead._model, step)  # the lookup has counted the next step
    ahead._optimizer.zero_grad()  # tables get the learning rate of the next step
    ahead.start_sparse_data_dist(batches[0], ahead.contexts[0])
    ahead.wait_sparse_data_dist(ahead.contexts[0])
    ahead.start_embedding_lookup(batches[0], ahead.contexts[0])


def _wait_for_updates(pipeline: StepPipeline, device: torch.device) -> None:
    """Make the current stream wait for tables that are updated on another stream."""
    stream = getattr(pipeline, "_data_dist_stream", None)
    if device.type == "cuda" and stream is not None:
        torch.cuda.current_stream(device).wait_stream(stream)


def evaluate(
    model: DistributedModelParallel,
    pipeline: StepPipeline,
    batches: Iterable[Batch],
    device: torch.device,
    *,
    is_stopped: Callable[[], bool] | None = None,
) -> Evaluation | None:
    """Evaluate the model on batches; the training pipeline keeps its own batches.

    Args:
        is_stopped: called after each batch; returns whether to give up, the same on all ranks.
            The result is then None.
    """
    rewritten = isinstance(pipeline, TrainPipelineSparseDist)
    if rewritten:
        _wait_for_updates(pipeline, device)
        pipeline.detach()
    model.eval()
    evaluator = Evaluator(device)
    stopped = False
    with torch.no_grad(), fused_steps_kept(model), uncompiled(model):
        for batch in batches:
            _, (_, logits, labels) = model(batch.to(device, non_blocking=True))
            evaluator.update(logits, labels)
            stopped = is_stopped is not None and is_stopped()
            if stopped:
                break
    model.train()
    if rewritten:
        pipeline.attach(model)
    return None if stopped else evaluator.compute()
