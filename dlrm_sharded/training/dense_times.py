"""Measures what a step does beside the embeddings, on one rank and without its tables."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torchrec.datasets.utils import Batch

from dlrm_sharded.distributed import Stopwatch
from dlrm_sharded.model import Dlrm
from dlrm_sharded.step.parts import DenseTimes
from dlrm_sharded.tables import Table
from dlrm_sharded.training.marked_layers import MarkedLayers
from dlrm_sharded.training.optimizers import OptimizerConfig
from dlrm_sharded.training.pooled_vectors import PooledVectors

MIN_ITERATIONS = 3
"""Smallest number of timed steps, which the time budget does not reduce."""

QUARTILES_OF_NORMAL = 1.349
"""Interquartile range of a normal distribution relative to its standard deviation."""


def measure_dense(
    model: Dlrm,
    tables: Sequence[Table],
    batches: Sequence[Batch],
    optimizer: OptimizerConfig,
    *,
    iterations: int = 20,
    time_budget_s: float = 2.0,
    data_ms: float = 0.0,
) -> DenseTimes:
    """Train the dense part of a model alone for some steps, and return the median times.

    The model is used up: its lookup is replaced by vectors that stay the same, and its weights
    change. Global random numbers are drawn, so whatever depends on a seed is built afterwards.

    Args:
        model: a model on its device that is not sharded; its tables may lack memory.
        batches: this rank's batches, on the model's device; used in turn.
        iterations: number of timed steps. One step before them is not timed: it allocates memory
            and compiles what has to be compiled.
        time_budget_s: time after which steps end early, though not before the third.
        data_ms: time to read a batch, which is not measured here.
    """
    first = batches[0]
    device = first.dense_features.device
    model.add_module("sparse_arch", PooledVectors(tables, len(first.labels), device))
    bottom = MarkedLayers(model.dense_arch, lambda: None)
    model.add_module("dense_arch", bottom)
    model.train()
    parameters = dict(model.named_parameters())
    dense_optimizer = optimizer.build_dense(parameters)
    _time_once(model, bottom, first, dense_optimizer, device)
    steps_ms: list[list[float]] = []
    started = time.perf_counter()
    while len(steps_ms) < iterations:
        if len(steps_ms) >= MIN_ITERATIONS and time.perf_counter() - started > time_budget_s:
            break
        batch = batches[len(steps_ms) % len(batches)]
        steps_ms.append(_time_once(model, bottom, batch, dense_optimizer, device))
    times_ms = np.array(steps_ms)
    before, bottom_forward, top_forward, top_backward, bottom_backward, update = np.median(
        times_ms, axis=0
    ).tolist()
    low, median, high = np.percentile(times_ms.sum(axis=1), [25, 50, 75])
    return DenseTimes(
        data_ms=data_ms,
        bottom_forward_ms=bottom_forward,
        top_forward_ms=before + top_forward,
        top_backward_ms=top_backward,
        bottom_backward_ms=bottom_backward,
        optimizer_ms=update,
        gradient_bytes=sum(parameter.nbytes for parameter in parameters.values()),
        spread=float((high - low) / QUARTILES_OF_NORMAL / median),
    )


def _time_once(
    model: Dlrm, bottom: MarkedLayers, batch: Batch, optimizer: Optimizer, device: torch.device
) -> list[float]:
    """Return the times of the parts of one step in ms."""
    watch = Stopwatch(device)
    bottom.mark = watch.mark
    watch.mark()
    loss, _ = model(batch)
    watch.mark()
    loss.backward()
    watch.mark()
    optimizer.step()
    optimizer.zero_grad()
    watch.mark()
    return watch.intervals_ms()


def measure_all_reduce(
    num_bytes: int, device: torch.device, *, iterations: int = 10, warmup: int = 2
) -> float:
    """Return the median time to all-reduce gradients in ms; all ranks call it together."""
    if dist.get_world_size() == 1:
        return 0.0
    gradients = torch.zeros(max(1, num_bytes // 4), device=device)
    times_ms = []
    for _ in range(warmup + iterations):
        dist.barrier()
        watch = Stopwatch(device)
        watch.mark()
        dist.all_reduce(gradients)
        watch.mark()
        times_ms += watch.intervals_ms()
    return float(np.median(times_ms[warmup:]))
