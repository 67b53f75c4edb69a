"""TorchRec's pipelines, which take the steps of a trainer, and evaluations beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

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

from dlrm_sharded.model.compiled import uncompiled
from dlrm_sharded.model.fused_lookups import fused_steps_kept
from dlrm_sharded.training.metrics import Evaluation, Evaluator

CLASSES: dict[str, type[Any]] = {"base": TrainPipelineBase, "sparse_dist": TrainPipelineSparseDist}
"""TorchRec's classes by the name of the pipeline, one of `PIPELINES`."""

StepPipeline: TypeAlias = TrainPipeline[Batch, tuple[Tensor, Tensor, Tensor]]


def set_schedule_step(scheduler: LRScheduler, step: int) -> None:
    """Set the learning rates to those of a step, as if the scheduler had taken all steps before."""
    if step == 0:
        return
    scheduler.last_epoch = step - 1
    with warnings.catch_warnings():  # the optimizer has not taken a step in this process
        warnings.simplefilter("ignore", UserWarning)
        scheduler.step()


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
