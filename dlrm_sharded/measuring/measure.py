"""Measures the cost of embeddings: each stage is timed by itself on the live sharded modules."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dlrm_sharded.files.errors import check_count, check_number
from dlrm_sharded.measuring.replica_stages import ReplicaStages, replica_stages
from dlrm_sharded.measuring.stage_clock import Iteration, StageClock, max_over_ranks
from dlrm_sharded.model.fused_lookups import fused_steps_kept
from dlrm_sharded.model.replicas import ShardedTables
from dlrm_sharded.plans.plan_cost import (
    BWD_COMM,
    BWD_COMPUTE,
    FWD_COMM,
    FWD_COMPUTE,
    INPUT_DIST,
    PlanCost,
)
from dlrm_sharded.ranks.gpus import GpuStates

LEAST_MS = 1e-6
"""Time that stands for zero in a ratio."""

MIN_ITERATIONS = 3
"""Smallest number of timed iterations, which the time budget does not reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """Length of a measurement.

    Args:
        iterations, warmup: timed iterations, and those before them that are not timed.
        num_batches: number of batches that are used in turn.
        time_budget_s: time after which iterations end early, though not before the third.
    """

    iterations: int = 20
    warmup: int = 3
    num_batches: int = 4
    time_budget_s: float = 10.0

    def __post_init__(self) -> None:
        for key in ("iterations", "warmup", "num_batches"):
            check_count(f"measure.{key}", getattr(self, key), least=1)
        check_number("measure.time_budget_s", self.time_budget_s, above=True)


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Median times of all ranks over the iterations, and how much the times varied.

    Args:
        spread: interquartile range relative to the median, averaged over ranks, for each stage
            and for the redistribution of the ids.
        iterations: number of timed iterations.
        launch_ms: median host time to launch each stage, on the slowest rank. It is not part of
            the cost, because it passes while a GPU computes something else. On a CPU, where nothing
            is launched, there is none.
        exposed: stages whose times on a GPU contain host time nevertheless.
        change: factor between the computation of the first and of the second half of the
            iterations on the median rank, at least 1.
        gpus: see `MachineLoad`.
    """

    cost: PlanCost
    spread: dict[str, float]
    iterations: int
    launch_ms: Mapping[str, float] = field(default_factory=dict)
    exposed: tuple[str, ...] = ()
    change: float = 1.0
    gpus: tuple[GpuStates, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredModule:
    """A sharded module of tables, and what it is measured with.

    Args:
        batches: this rank's ids, on the module's device; used in turn.
        replica_optimizer: updates the module's replicas, see `replicas.replica_optimizer`; None if
            it has none.
    """

    embeddings: ShardedTables
    batches: Sequence[KeyedJaggedTensor]
    replica_optimizer: Optimizer | None = None


def measure(
    embeddings: ShardedTables,
    batches: Sequence[KeyedJaggedTensor],
    config: MeasureConfig,
    *,
    group: dist.ProcessGroup | None = None,
    replica_optimizer: Optimizer | None = None,
) -> MeasuredCost:
    """Time the four stages and the redistribution of ids on a model's only module of tables.

    All ranks of the group call it together. Weights and optimizer state do not change, except for
    the moments of Adam, see `measure_modules`.

    Args:
        embeddings: the sharded module.
        batches: this rank's ids, on the module's device; used in turn.
        group: ranks that share the module; None for all ranks of the job.
        replica_optimizer: updates the module's replicas; None if it has none.

    Raises:
        ValueError: there are replicas, but no optimizer for them.
    """
    return measure_modules(
        [MeasuredModule(embeddings, batches, replica_optimizer)], config, group=group
    )


def measure_modules(
    modules: Sequence[MeasuredModule],
    config: MeasureConfig,
    *,
    group: dist.ProcessGroup | None = None,
) -> MeasuredCost:
    """Time the four stages and the redistribution of ids, each started from a barrier.

    All ranks of the group call it together. Modules are timed one after the other, and a stage is
    the sum of theirs. Gradients are zeros and the optimizers' step counts are restored, so weights
    and optimizer state do not change, except that the moments of an Adam that has taken steps
    before decay.

    Args:
        modules: at least one; each with the same number of batches.
        group: ranks that share the modules; None for all ranks of the job.
    """
    device = modules[0].batches[0].device()
    clock = StageClock(device, group)

    def time_once(i: int) -> Iteration:
        for module, stages in zip(modules, replicas, strict=True):
            ids = module.batches[i % len(module.batches)]
            _time_once(module.embeddings, ids, clock, stages)
        return clock.finish_iteration()

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(fused_steps_kept(module.embeddings))
        replicas = [
            stack.enter_context(replica_stages(module.embeddings, module.replica_optimizer))
            for module in modules
        ]
        started = time.perf_counter()
        for i in range(config.warmup):
            last_started = time.perf_counter()
            time_once(i)
        ended = time.perf_counter()
        # the first iteration allocates memory, so the last one predicts how long others take
        spent_s = max_over_ranks(ended - started, device, group)
        once_s = max_over_ranks(ended - last_started, device, group)
        affordable = int((config.time_budget_s - spent_s) / once_s)
        iterations = max(MIN_ITERATIONS, min(config.iterations, affordable))
        timed = [time_once(i) for i in range(iterations)]
    return _over_ranks(timed, group)


def _time_once(
    embeddings: ShardedTables, ids: KeyedJaggedTensor, clock: StageClock, replicas: ReplicaStages
) -> None:
    """Time the stages and the ids' redistribution once."""
    timed = clock.timed
    context: Any = embeddings.create_context()
    # the host waits for the numbers of ids that it is going to receive
    received: Any = timed(
        INPUT_DIST, lambda: embeddings.input_dist(context, ids).wait().wait(), waits=True
    )
    looked_up = timed(FWD_COMPUTE, lambda: embeddings.compute(context, received))
    leaves = [vectors.detach().requires_grad_() for vectors in looked_up]
    outputs = timed(FWD_COMM, lambda: vectors_of(embeddings.output_dist(context, leaves).wait()))
    output_gradients = [torch.zeros_like(output) for output in outputs]

    def exchange_gradients() -> None:
        torch.autograd.backward(outputs, output_gradients)
        replicas.all_reduce()

    timed(BWD_COMM, exchange_gradients)
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    fused = [place for place in range(len(looked_up)) if place not in replicas.places]

    def update() -> None:
        if fused:
            torch.autograd.backward([looked_up[i] for i in fused], [gradients[i] for i in fused])
        replicas.update(looked_up, gradients)

    timed(BWD_COMPUTE, update)


def vectors_of(output: KeyedTensor | Mapping[str, JaggedTensor]) -> list[Tensor]:
    """Return the vectors that a module outputs: pooled ones, or one for each id of a feature."""
    if isinstance(output, KeyedTensor):
        return [output.values()]
    return [sequence.values() for sequence in output.values()]


def _over_ranks(iterations: Sequence[Iteration], group: dist.ProcessGroup | None) -> MeasuredCost:
    """Gather the times of every rank and take the quartiles over its iterations.

    Letters: W ranks, N iterations.
    """
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, iterations, group=group)

    def gathered(quantity: str) -> dict[str, NDArray[Any]]:
        """Return a quantity of `Iteration` by stage, [W, N]."""
        return {
            name: np.array([[getattr(i, quantity)[name] for i in of_rank] for of_rank in by_rank])
            for name in getattr(iterations[0], quantity)
        }

    medians_ms, spread = {}, {}
    by_stage = gathered("times_ms")
    change = _change(by_stage[FWD_COMPUTE] + by_stage[BWD_COMPUTE])
    for name, times_ms in by_stage.items():
        low, median, high = np.percentile(times_ms, [25, 50, 75], axis=1)
        medians_ms[name] = median.tolist()
        spread[name] = float(((high - low) / np.maximum(median, 1e-9)).mean())
    input_dist_ms = medians_ms.pop(INPUT_DIST)
    launch_ms = gathered("launch_ms")
    is_exposed = gathered("is_exposed")
    return MeasuredCost(
        cost=PlanCost.from_stages(medians_ms, input_dist_ms=input_dist_ms),
        spread=spread,
        iterations=len(iterations),
        launch_ms={name: float(np.median(ms, axis=1).max()) for name, ms in launch_ms.items()},
        # more than half of a rank's iterations, so that the median is one of them
        exposed=tuple(name for name, flags in is_exposed.items() if flags.mean(axis=1).max() > 0.5),
        change=change,
    )


def _change(times_ms: NDArray[Any]) -> float:
    """Return the factor between both halves of times [W, N]: the median rank's, at least 1."""
    half = times_ms.shape[1] // 2
    first, second = (
        np.maximum(np.median(part, axis=1), LEAST_MS)
        for part in (times_ms[:, :half], times_ms[:, half:])
    )
    return float(np.exp(np.abs(np.median(np.log(second / first)))))
