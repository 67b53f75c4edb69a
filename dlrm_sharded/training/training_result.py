"""Holds the result of a training run, and finds its peak memory."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.machine_load import MachineLoad
from dlrm_sharded.training.best import Best
from dlrm_sharded.training.metrics import Evaluation
from dlrm_sharded.training.step_choice import StepOptions


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Outcome of a training run. Throughput covers all ranks and the steps after the warm-up.

    Of these, `samples_per_s` and `samples_per_s_p10` leave out the traced ones.

    Args:
        options: how steps ran after the warm-up.
        step_ms: median time of a step, from which `samples_per_s` follows.
        samples_per_s_p10: throughput that nine tenths of the steps exceed.
        samples_per_s_overall: throughput of the whole loop, with its stalls, logs, traces and
            evaluations, except the evaluation at the end.
        peak_gib, reserved_gib: see `peak_memory_gib`.
        ids_out_of_range: number of ids beyond each table's rows, by its name, in all batches.
        best: the best evaluation, where evaluations were compared.
        unsaved: why the last checkpoint could not be written; None if it was, or none was due.
    """

    num_steps: int
    options: StepOptions
    step_ms: float
    samples_per_s: float
    samples_per_s_p10: float
    samples_per_s_overall: float
    loss: float
    evaluation: Evaluation
    peak_gib: float
    machine_load: MachineLoad
    ids_out_of_range: Mapping[str, int] = field(default_factory=dict)
    reserved_gib: float | None = None
    best: Best | None = None
    unsaved: str | None = None


def peak_memory_gib(rank: Rank) -> tuple[float, float | None]:
    """Return the largest memory use and the largest reserved memory of any rank; a collective.

    On CUDA these are the tensors, and the blocks that torch reserved for them on the device. On a
    CPU the first one is the process's peak resident memory, and the second one is None.
    """
    if rank.device.type == "cuda":
        used_bytes = torch.cuda.max_memory_allocated(rank.device)
        held_bytes = torch.cuda.max_memory_reserved(rank.device)
    else:
        used_bytes, held_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
    found = [(0, 0)] * rank.world_size
    dist.all_gather_object(found, (used_bytes, held_bytes))
    used, held = (max(of_ranks) / GIB for of_ranks in zip(*found, strict=True))
    return used, held or None
