"""The tracer of a training's steps, if its config asks for one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.tracing.step_tracer import StepTracer, Trace, steps_to_trace
from dlrm_sharded.training.trainer_config import TrainerConfig

log = logging.getLogger(__name__)


def make_tracer(
    model: nn.Module,
    config: TrainerConfig,
    rank: Rank,
    *,
    start_step: int,
    num_steps: int,
    local_batch_size: int,
    conclude: Callable[[Trace], None],
) -> StepTracer | None:
    """Return what traces the steps after the warm-up; None if no such step is left.

    Args:
        start_step, num_steps: steps before this process began, and of the whole training.
        conclude: called on rank 0 with the trace.
    """
    warmup = config.num_warmup_steps
    steps = steps_to_trace(
        start=start_step, warmup=warmup, wanted=config.trace_steps, total=num_steps
    )
    num_traced = 0 if steps is None else steps.count - 1
    if num_traced < config.trace_steps and rank.is_zero:
        log.warning(
            "trainer.trace: %d of %d steps are traced, as the training ends at step %d, and "
            "%d steps to warm up and one in which the profiler starts come before; set "
            "trainer.num_steps to at least %d",
            num_traced,
            config.trace_steps,
            num_steps,
            warmup,
            start_step + warmup + 1 + config.trace_steps,
        )
    if steps is None:
        return None
    return StepTracer(model, steps, rank, local_batch_size=local_batch_size, conclude=conclude)
