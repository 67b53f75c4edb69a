"""Chooses how the steps of a training run on GPUs run, by a measurement of its first steps.

Where a device waits for its host's kernel launches, as with small batches, a CUDA graph of the
dense part saves most of them. Elsewhere, compiled layers take less device time
(docs/notes/gpus.md). What is chosen trains as `base` does, up to rounding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from dlrm_sharded.model.compiled import MODES_WITH_GRAPHS, NOT_COMPILED
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.stopwatch import Stopwatch

TRIAL_STEPS, UNTIMED_STEPS = 20, 5
"""Steps of a trial, and the first ones, in which libraries choose kernels and allocate memory."""

HOST_LEAD = 0.5
"""A step is host-bound if the device finishes it within this fraction of a step after its launch.
At 8,192 samples of MLPerf's model, an H200 works for 35 % of a step, so it cannot finish later than
that. At 65,536 it works for 97 %, and the host needs a third of a step (docs/notes/gpus.md)."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How steps run.

    Args:
        pipeline: one of `pipelines.PIPELINES`.
        compile_mode: one of `compiled.COMPILE_MODES`.
        dense_graph: whether a `DenseGraph` computes the dense part.
    """

    pipeline: str
    compile_mode: str
    dense_graph: bool

    def __str__(self) -> str:
        graph = str(self.dense_graph).lower()
        keys = f"trainer.pipeline={self.pipeline} model.compile_mode={self.compile_mode}"
        return f"{keys} model.dense_graph={graph}"


@dataclass(frozen=True, slots=True)
class AskedOptions:
    """The `StepOptions` that a config asks for; None leaves the choice to the run."""

    pipeline: str | None
    compile_mode: str | None
    dense_graph: bool | None

    @property
    def are_open(self) -> bool:
        return None in (self.pipeline, self.compile_mode, self.dense_graph)

    def or_else(self, pipeline: str, compile_mode: str, *, dense_graph: bool) -> StepOptions:
        """Return the options, with these arguments in the place of None."""
        return StepOptions(
            self.pipeline or pipeline,
            self.compile_mode or compile_mode,
            dense_graph if self.dense_graph is None else self.dense_graph,
        )


def untried_options(asked: AskedOptions, device: torch.device) -> StepOptions:
    """Return the options of steps that are not measured: on a CPU, or in a short training run."""
    pipeline = "sparse_dist" if device.type == "cuda" else "base"
    return asked.or_else(pipeline, NOT_COMPILED, dense_graph=False)


def first_options(asked: AskedOptions) -> StepOptions:
    """Return the options of the steps that are measured."""
    return asked.or_else("base", NOT_COMPILED, dense_graph=True)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a step: the largest step time and the smallest lead of any rank.

    Args:
        step_ms: time on the device from the end of a step to the end of the next one.
        lead_ms: time for which the device still works after the host has launched a step.
        graph_fits: whether a graph of the dense part fits the memory.
    """

    step_ms: float
    lead_ms: float
    graph_fits: bool

    @property
    def host_bounds(self) -> bool:
        return self.lead_ms < HOST_LEAD * self.step_ms

    def __str__(self) -> str:
        who = "the host bounds" if self.host_bounds else "the GPU bounds"
        return (
            f"{who} the steps, which take {self.step_ms:.1f} ms: the GPU has done a step "
            f"{self.lead_ms:.1f} ms after its launch"
        )


def chosen_options(asked: AskedOptions, times: StepTimes, world_size: int) -> StepOptions:
    """Return the fastest known options for such steps, of those that give equal losses."""
    takes_graph = (
        times.host_bounds and times.graph_fits and asked.compile_mode not in MODES_WITH_GRAPHS
    )
    is_eager = times.host_bounds or asked.dense_graph
    return asked.or_else(
        "base" if times.host_bounds and world_size == 1 else "sparse_dist",
        NOT_COMPILED if is_eager else "default",
        dense_graph=takes_graph,
    )


class StepTrial:
    """Measures the first steps of a training run.

    The host's CPU time would not show which of the two bounds them: CUDA spins while it waits for a
    device, and another thread launches the backward pass.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._watch = Stopwatch(rank.device)
        self._launched_s: list[float] = []
        self._num_steps = 0

    def add(self) -> bool:
        """Note that a step was launched, and return whether it was the last one of the trial."""
        self._num_steps += 1
        if self._num_steps >= UNTIMED_STEPS:
            self._watch.mark()  # the first call returns when the device is idle
            self._launched_s.append(time.perf_counter())
        return self._num_steps == TRIAL_STEPS

    def times(self) -> StepTimes:
        """Return the worst of all ranks' median times; a collective of all ranks."""
        step_ms = np.array(self._watch.intervals_ms())
        launched_ms = 1e3 * np.diff(self._launched_s).cumsum()
        lead_ms = float(np.median(np.maximum(step_ms.cumsum() - launched_ms, 0.0)))
        lacks_memory = not _graph_fits(self._rank.device)
        found = torch.tensor([np.median(step_ms), -lead_ms, lacks_memory], device=self._rank.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        slowest_ms, least_lead_ms, lacks_memory = found.tolist()
        return StepTimes(slowest_ms, -least_lead_ms, graph_fits=not lacks_memory)


def _graph_fits(device: torch.device) -> bool:
    """Return whether a step fits while a graph of the dense part keeps its memory.

    The graph keeps less than a step's peak above the permanent tensors; the step needs that again.
    """
    if device.type != "cuda":
        return True
    held = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - held
    return free >= 2 * (torch.cuda.max_memory_allocated(device) - held)
