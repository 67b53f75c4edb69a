"""Estimates a run's memory before anything is built, and refuses a run that would not fit."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dlrm_sharded.datasets.base import CachingDataset
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.job.prepare import Prepared
from dlrm_sharded.model.optimizers import DENSE_STATE_TENSORS
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import GIB
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.device_memory import available_host_bytes, used_and_available_bytes
from dlrm_sharded.training.dense_memory import trace_dense
from dlrm_sharded.training.memory import MemoryNeeds, estimate_host_memory, estimate_memory
from dlrm_sharded.training.rank_memory import Budget, RankMemory, memory_text

log = logging.getLogger(__name__)

FILE_NAME = "memory.json"
Figures = tuple[int, int, int]
"""Bytes that a rank uses already, and bytes available on its device and on its host."""

COPY_SHARE = 0.9
"""Largest share of the available memory that a run may need with copies for checkpoints."""

CUDA_LIBRARY_BYTES = 2**28
"""Workspaces and kernels that CUDA's libraries load on a device once its context exists."""


@dataclass(frozen=True, slots=True)
class CheckedMemory:
    """The estimated memory of all ranks, which was compared with the available memory.

    Args:
        host: host memory of ranks on GPUs; empty on CPUs, where `ranks` has all memory.
        has_checkpoint_copy: whether the memory includes copies of the model, from which checkpoints
            are written while training continues.
    """

    ranks: tuple[RankMemory, ...]
    host: tuple[RankMemory, ...]
    has_checkpoint_copy: bool

    def estimated_peak_bytes(self, *, on_cuda: bool) -> int:
        """Return the peak of the fullest rank, counted as `peak_gib` of a result is."""
        return max(rank.tensors if on_cuda else rank.total for rank in self.ranks)

    def write(self, run_dir: Path) -> None:
        """Write memory.json."""
        memory = {"ranks": self.ranks, "host": self.host}
        of_ranks = {key: [rank.to_json() for rank in ranks] for key, ranks in memory.items()}
        write_json(run_dir / FILE_NAME, {key: ranks for key, ranks in of_ranks.items() if ranks})


def check_memory(prepared: Prepared, plan: ShardingPlan) -> CheckedMemory:
    """Log and check the memory that the ranks need; all ranks call this together.

    A dry run logs the memory of every rank, and only warns of a plan that does not fit.

    Raises:
        InfeasibleTaskError: the ranks need more memory than is available, and `check_memory` is
            set; all ranks raise it.
    """
    settings, rank = prepared.settings, prepared.rank
    with all_or_none():
        figures = (*used_and_available_bytes(rank.device), available_host_bytes())
    found: list[Figures] = [figures] * rank.world_size
    dist.all_gather_object(found, figures)
    checkpoint = settings.trainer.checkpoint
    wanted = checkpoint.background if checkpoint is not None and checkpoint.is_enabled else False

    def checked() -> CheckedMemory:
        needs = dataclasses.replace(_traced_needs(prepared), checkpoint_copy=wanted is not False)
        budgets = _budgets(prepared, plan, needs, found)
        if wanted is None:
            _, needed, most = budgets[-1].fullest()  # the host has the copies
            if needed > COPY_SHARE * most:
                log.info("too little memory for copies: the training waits for its checkpoints")
                needs = dataclasses.replace(needs, checkpoint_copy=False)
                budgets = _budgets(prepared, plan, needs, found)
        for budget in budgets:
            _report(budget, logs_all_ranks=settings.dry_run)
            try:
                budget.check()
            except InfeasibleTaskError as error:
                if settings.check_memory and not settings.dry_run:
                    raise
                log.warning("%s", error)
        host = budgets[-1].ranks if budgets[-1].is_host else ()
        return CheckedMemory(budgets[0].ranks, host, needs.checkpoint_copy)

    return on_rank_zero(checked)


def _traced_needs(prepared: Prepared) -> MemoryNeeds:
    """Return a run's needs besides its tables and plan, by tracing the model without memory."""
    settings, dataset = prepared.settings, prepared.settings.dataset
    trainer, world_size = settings.trainer, prepared.rank.world_size
    dense = trace_dense(
        functools.partial(settings.build_model, prepared.task),
        dataset.tables,
        num_dense=dataset.num_dense,
        local_batch_size=dataset.batch_size // world_size,
    )
    num_train, num_val = dataset.num_batches("train"), dataset.num_batches("val")
    if trainer.num_eval_batches is not None:
        num_val = min(num_val, trainer.num_eval_batches)
    cached_bytes = 0
    if isinstance(dataset, CachingDataset):
        cached_bytes = dataset.cached_bytes(
            num_train_batches=min(num_train, trainer.num_steps or num_train),
            num_val_batches=num_val,
            world_size=world_size,
        )
    return MemoryNeeds(
        dense=dense,
        dense_state_bytes=DENSE_STATE_TENSORS[settings.optimizer.dense] * dense.parameter_bytes,
        num_dense=dataset.num_dense,
        num_measured_batches=0 if cached_bytes else min(num_train, settings.measure.num_batches),
        num_eval_samples=num_val * dataset.batch_size,
        cached_batch_bytes=cached_bytes,
        pipeline=trainer.pipeline_on(prepared.rank.device),
    )


def _budgets(
    prepared: Prepared, plan: ShardingPlan, needs: MemoryNeeds, found: Sequence[Figures]
) -> list[Budget]:
    """Return the ranks' budgets: their needs, and the memory that they found available.

    A rank on a GPU has two budgets: the memory of the GPU, and a share of its host's.
    """
    task, rank = prepared.task, prepared.rank
    per_host, on_cuda = rank.local_world_size, rank.device.type == "cuda"
    library = CUDA_LIBRARY_BYTES if on_cuda else 0
    budget = Budget(
        ranks=estimate_memory(plan, task, needs, [used + library for used, _, _ in found]),
        available_bytes=[available - library for _, available, _ in found],
        ranks_per_host=1 if on_cuda else per_host,
    )
    if not on_cuda:
        return [budget]
    host = estimate_host_memory(plan, task, needs)
    on_host = [of_host for _, _, of_host in found]
    of_host = Budget(ranks=host, available_bytes=on_host, ranks_per_host=per_host, is_host=True)
    return [budget, of_host]


def used_text(estimated_bytes: int, peak_gib: float, reserved_gib: float | None) -> str:
    """Return a text with the peak memory, its estimate, and what torch reserved for it."""
    estimate_gib = estimated_bytes / GIB
    held = "" if reserved_gib is None else f"; torch held {reserved_gib:.3f} GiB of a GPU for it"
    return (
        f"peak memory of a rank {peak_gib:.3f} GiB, estimated {estimate_gib:.3f} GiB "
        f"({100 * (estimate_gib / peak_gib - 1):+.0f} %){held}"
    )


def _report(budget: Budget, *, logs_all_ranks: bool) -> None:
    of_host = " of host memory" if budget.is_host else ""
    for rank, memory in enumerate(budget.ranks if logs_all_ranks else ()):
        log.info("memory that rank %d needs%s:\n%s", rank, of_host, memory_text(memory))
    ranks, needed, available = budget.fullest()
    log.info(
        "%s: the run will take %.3f GiB of %.3f GiB%s that are available (%.0f %%)",
        f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}",
        needed / GIB,
        available / GIB,
        of_host,
        100 * needed / max(1, available),
    )
