"""Measures what a step does beside the embeddings, on one rank and without its tables."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch

from dlrm_sharded.dense.pooled_vectors import PooledVectors, replace_lookups
from dlrm_sharded.model.dlrm import Dlrm
from dlrm_sharded.model.marked_layers import MarkedLayers
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.launch_clock import LaunchClock, Launched
from dlrm_sharded.step.parts import DenseTimes

log = logging.getLogger(__name__)

MIN_ITERATIONS = 3
"""Smallest number of timed steps, which the time budget does not reduce."""

QUARTILES_OF_NORMAL = 1.349
"""Interquartile range of a normal distribution relative to its standard deviation."""


class DenseBench:
    """Trains the dense part of a model alone, and times the parts of its steps.

    The model is used up: its lookup is replaced by vectors that stay the same, and its weights
    change. Global random numbers are drawn, so whatever depends on a seed is built afterwards. One
    step is not timed: it allocates memory and compiles what has to be compiled. A GPU sleeps while
    the host launches a step, so that the parts are times of the GPU alone.

    Args:
        model: a model on its device that is not sharded; its tables may lack memory.
        batches: this rank's batches, on the model's device; used in turn.

    Attributes:
        gradient_bytes: size of the gradients that ranks all-reduce.
    """

    def __init__(
        self,
        model: Dlrm,
        tables: Sequence[Table],
        batches: Sequence[Batch],
        optimizer: OptimizerConfig,
    ) -> None:
        first = batches[0]
        self._device = first.dense_features.device
        replace_lookups(model, PooledVectors(tables, len(first.labels), self._device))
        self._bottom = MarkedLayers(model.dense_arch, lambda: None)
        model.add_module("dense_arch", self._bottom)
        model.train()
        self._model = model
        self._batches = batches
        parameters = dict(model.named_parameters())
        self._optimizer = optimizer.build_dense(parameters)
        self.gradient_bytes = sum(parameter.nbytes for parameter in parameters.values())
        self._clock = LaunchClock(self._device)
        self._steps: list[Launched] = []
        self._time_once(first)

    def run(self, iterations: int, *, time_budget_s: float = math.inf) -> None:
        """Time some more steps.

        Args:
            time_budget_s: time after which steps end early, though not before the third.
        """
        started = time.perf_counter()
        for num_done in range(iterations):
            if num_done >= MIN_ITERATIONS and time.perf_counter() - started > time_budget_s:
                break
            batch = self._batches[len(self._steps) % len(self._batches)]
            self._steps.append(self._time_once(batch))

    def times(self, *, data_ms: float = 0.0) -> DenseTimes:
        """Return the median times of all steps so far; there must be at least one.

        Args:
            data_ms: time to read a batch, which is not measured here.
        """
        times_ms = np.array([step.intervals_ms for step in self._steps])
        before, bottom_forward, top_forward, top_backward, bottom_backward, update = np.median(
            times_ms, axis=0
        ).tolist()
        low, median, high = np.percentile(times_ms.sum(axis=1), [25, 50, 75])
        if np.mean([step.is_exposed for step in self._steps]) > 0.5:
            log.warning(
                "the times of the dense part contain host time: the host is slow, or waits within "
                "them"
            )
        return DenseTimes(
            data_ms=data_ms,
            bottom_forward_ms=bottom_forward,
            top_forward_ms=before + top_forward,
            top_backward_ms=top_backward,
            bottom_backward_ms=bottom_backward,
            optimizer_ms=update,
            launch_ms=float(np.median([step.launch_ms for step in self._steps])),
            gradient_bytes=self.gradient_bytes,
            spread=float((high - low) / QUARTILES_OF_NORMAL / median),
        )

    def _time_once(self, batch: Batch) -> Launched:
        """Return the times of the parts of one step."""
        clock = self._clock
        self._bottom.mark = clock.mark
        clock.begin()
        clock.mark()
        loss, _ = self._model(batch)
        clock.mark()
        loss.backward()
        clock.mark()
        self._optimizer.step()
        self._optimizer.zero_grad()
        clock.mark()
        launched = clock.end()
        clock.adapt(clock.longest_queueing_ms)
        return launched


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
    """Train the dense part of a model alone for some steps, see `DenseBench`."""
    bench = DenseBench(model, tables, batches, optimizer)
    bench.run(iterations, time_budget_s=time_budget_s)
    return bench.times(data_ms=data_ms)


def measure_all_reduce(
    num_bytes: int, device: torch.device, *, iterations: int = 10, warmup: int = 2
) -> float:
    """Return the median time to all-reduce gradients in ms; all ranks call it together."""
    if dist.get_world_size() == 1:
        return 0.0
    gradients = torch.zeros(max(1, num_bytes // 4), device=device)
    clock = LaunchClock(device)
    times_ms = []
    for _ in range(warmup + iterations):
        dist.barrier()
        clock.begin()
        if device.type == "cuda":
            dist.all_reduce(gradients[:1])  # the devices start together, which sleep equally long
        clock.mark()
        dist.all_reduce(gradients)
        clock.mark()
        times_ms += clock.end().intervals_ms
    return float(np.median(times_ms[warmup:]))
