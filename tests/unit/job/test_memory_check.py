"""Memory before a run: a GPU's and its host's are two budgets; how long a copy takes is said."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_sharded.checkpoint.saver import CheckpointConfig
from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.job import memory_check
from dlrm_sharded.job.memory_check import CheckedMemory, check_memory
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.dense_memory import DenseMemory
from dlrm_sharded.training.memory import MemoryNeeds
from dlrm_sharded.training.rank_memory import RankMemory

TABLE = Table("t", 2**25, 128, 1.0)
"""16 GiB of weights."""

DENSE = DenseMemory(parameter_bytes=5000, buffer_bytes=300, activation_bytes=70_000)
NEEDS = MemoryNeeds(
    dense=DENSE, dense_state_bytes=5000, num_dense=13, num_measured_batches=1, num_eval_samples=1
)


def checked(
    monkeypatch: pytest.MonkeyPatch,
    rank: Rank,
    *,
    device: str = "cuda",
    free_gib: float,
    host_gib: float,
    background: bool | None = None,
) -> CheckedMemory:
    """What is found for a rank whose device and host have so much memory left."""
    free_bytes = int(free_gib * GIB)
    monkeypatch.setattr(memory_check, "used_and_available_bytes", lambda device: (GIB, free_bytes))
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: int(host_gib * GIB))
    task = ShardingTask((TABLE,), Topology(1, 80 * GIB, compute_device=device), 64)
    monkeypatch.setattr(memory_check, "_traced_needs", lambda prepared: NEEDS)
    checkpoint = CheckpointConfig(every_s=600, background=background)
    trainer = SimpleNamespace(checkpoint=checkpoint)
    prepared: Any = SimpleNamespace(
        settings=SimpleNamespace(trainer=trainer, check_memory=True, dry_run=False),
        rank=dataclasses.replace(rank, device=torch.device(device)),
        task=task,
    )
    return check_memory(prepared, ShardingPlan.from_ranks(task, [0]))


@pytest.mark.parametrize(
    ("device", "free_gib", "host_gib", "copies"),
    [
        ("cuda", 20, 100, True),
        ("cuda", 20, 17, False),
        ("cuda", 80, 17, False),
        ("cpu", 20, 20, False),
        ("cpu", 80, 80, True),
    ],
    ids=["full_gpu", "full_gpu_and_host", "full_host", "full_cpu", "free_cpu"],
)
def test_copies_are_made_where_the_host_has_memory(
    device, free_gib, host_gib, copies, monkeypatch, rank
):
    memory = checked(monkeypatch, rank, device=device, free_gib=free_gib, host_gib=host_gib)
    assert memory.has_checkpoint_copy == copies
    assert len(memory.host) == (device == "cuda")


def test_copies_that_are_asked_for_and_do_not_fit_the_host_are_refused(monkeypatch, rank):
    with pytest.raises(
        InfeasibleTaskError, match=r"needs 16\.00 GiB of host memory .copy of the m"
    ):
        checked(monkeypatch, rank, free_gib=80, host_gib=15, background=True)
    assert checked(monkeypatch, rank, free_gib=20, host_gib=17, background=True).has_checkpoint_copy


def test_tables_that_do_not_fit_the_gpu_are_refused(monkeypatch, rank):
    with pytest.raises(InfeasibleTaskError, match=r"rank 0 needs 16\.00 GiB \(table shards"):
        checked(monkeypatch, rank, free_gib=15, host_gib=100)


def test_a_peak_on_a_gpu_is_compared_with_its_tensors():
    """There, the peak that is measured has neither the context nor NCCL's buffers."""
    ranks = tuple(RankMemory(process=100, table_weights=size, nccl=20, slack=3) for size in (5, 7))
    memory = CheckedMemory(ranks, ranks, False)
    assert memory.estimated_peak_bytes(on_cuda=True) == 7
    assert memory.estimated_peak_bytes(on_cuda=False) == 130
