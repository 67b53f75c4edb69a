"""Pipelines that a trainer calls for the batches of a step and of an evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_sharded.training.metrics import Evaluation, Evaluator


def set_schedule_step(scheduler: LRScheduler, step: int) -> None:
    """Set the learning rates to those of a step, as if the scheduler had taken all steps before."""
    if step == 0:
        return
    scheduler.last_epoch = step - 1
    with warnings.catch_warnings():  # the optimizer has not taken a step in this process
        warnings.simplefilter("ignore", UserWarning)
        scheduler.step()


def redistributes_ahead(name: str, device: torch.device) -> bool:
    """Return whether a pipeline redistributes the ids of a step during the step before."""
    return name == "sparse_dist" or (name == "auto" and device.type == "cuda")


def make_pipeline(
    name: str,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    device: torch.device,
) -> TrainPipeline[Batch, tuple[Tensor, Tensor, Tensor]]:
    if redistributes_ahead(name, device):
        return TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    return TrainPipelineBase(model, optimizer, device)


def evaluate(
    model: DistributedModelParallel,
    pipeline: TrainPipeline[Batch, tuple[Tensor, Tensor, Tensor]],
    batches: Iterable[Batch],
    device: torch.device,
    *,
    is_stopped: Callable[[], bool] | None = None,
) -> Evaluation | None:
    """Evaluate some batches; the training pipeline keeps its own batches.

    Args:
        is_stopped: called after each batch; returns on all ranks alike whether to give up, and
            then there is no evaluation.
    """
    rewritten = isinstance(pipeline, TrainPipelineSparseDist)
    if rewritten:
        pipeline.detach()
    model.eval()
    evaluator = Evaluator(device)
    stopped = False
    with torch.no_grad():
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
