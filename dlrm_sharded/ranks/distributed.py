"""Ranks, their devices and groups.

No other module starts or ends a process group.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlrm_sharded.files.errors import ConfigError, HungRankError, LostRankError, RankError
from dlrm_sharded.plans.task import Topology
from dlrm_sharded.plans.topology_settings import TopologySettings
from dlrm_sharded.ranks.agreement import check_before_group
from dlrm_sharded.ranks.attempt import rank_number
from dlrm_sharded.ranks.device_memory import free_bytes
from dlrm_sharded.ranks.devices import column_limit, device_type
from dlrm_sharded.ranks.host_links import connect_hosts
from dlrm_sharded.ranks.job_store import JobStore
from dlrm_sharded.ranks.process import die_with_parent, forget_frames, keep_freed_memory, num_cores
from dlrm_sharded.ranks.watch import Heartbeat, Watch

log = logging.getLogger(__name__)

_further_groups: list[dist.ProcessGroup] = []
"""Groups that `new_group_of` has made, in addition to the job's group."""

_group_timeout: timedelta | None = None
"""Timeout of the job's group, which later groups get, too."""

_heartbeat = Heartbeat()
"""The progress of this process, in all its groups."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The numbers of a process in its job, the device on which it computes, and its progress."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False, repr=False)

    @property
    def is_zero(self) -> bool:
        return self.rank == 0


def rank_from_environment() -> Rank:
    """Return this process as a rank of its group, or else as the rank that torchrun set for it.

    Without either, it is the only rank. Local ranks come from torchrun's variables; without them,
    all ranks are on one host.

    Raises:
        ConfigError: there are GPUs that torch cannot use; see `device_type`.
    """
    rank, world_size = rank_number(), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank % local_world_size)))
    return Rank(rank, world_size, local_rank, local_world_size, device_of(local_rank), _heartbeat)


def device_of(local_rank: int) -> torch.device:
    """Return a process's device; in a group, the GPU that the process or group already uses."""
    if device_type() != "cuda":
        return torch.device("cpu")
    if dist.is_initialized():
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None:
            return torch.device(bound)
        if torch.cuda.is_initialized():
            return torch.device("cuda", torch.cuda.current_device())
        local_rank %= torch.cuda.device_count()  # each rank may see only its own
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(
    timeout_s: float = 600, *, must_match: Mapping[str, Any] | None = None
) -> Iterator[Rank]:
    """Join this process to the job's group as one rank; NCCL on CUDA, gloo elsewhere.

    Linux ends the process when torchrun's agent dies, so that no orphan holds a GPU. Nested blocks
    use the same group, so that several runs in one process share it.

    Args:
        timeout_s: time that a rank waits for the others.
        must_match: values that must be equal on all ranks, see `ranks.agreement`; None for none.

    Raises:
        ConfigError: a host shows fewer GPUs than it has ranks, torch cannot use them, or hosts
            cannot connect to each other.
        EndedRankError: another rank ended with an error before it came here.
        HungRankError: other ranks did not come here, or to a collective in the block, in time.
        LostRankError: another rank disappeared during a collective in the block. With NCCL, its own
            watchdog ends the process in the last two cases.
        UnlikeRanksError: the values differ between ranks.
    """
    rank = rank_from_environment()
    if dist.is_initialized():
        with _further_groups_end():
            yield rank
        return
    _prepare_device(rank)
    watch = _meet(rank, timeout_s, must_match)
    try:
        _join(rank, watch.job)
        watch.start()
        yield rank
    except BaseException as error:
        watch.stop()
        # The other ranks are still connected to this one.
        lost = watch.explain(error) if isinstance(error, Exception) else None
        _leave_after(error, lost, on_cuda=rank.device.type == "cuda")
        if lost is None:
            raise
        raise lost from lost.__cause__
    watch.stop()
    _leave_group()


def _meet(rank: Rank, timeout_s: float, must_match: Mapping[str, Any] | None) -> Watch:
    """Wait for all ranks, compare their values, connect their hosts; return this rank's watch."""
    if "MASTER_ADDR" in os.environ:
        die_with_parent()
    job = JobStore(rank.rank, rank.world_size, timeout_s)
    job.meet()
    if must_match is not None:
        check_before_group({**must_match, "type of device": rank.device.type}, job)
    connect_hosts(job)
    return Watch(rank.heartbeat, job, speaks_for_host=rank.local_rank == 0)


def _join(rank: Rank, job: JobStore) -> None:
    global _group_timeout
    _group_timeout = timedelta(seconds=job.timeout_s)
    on_cuda = rank.device.type == "cuda"
    dist.init_process_group(
        backend="nccl" if on_cuda else "gloo",
        timeout=_group_timeout,
        device_id=rank.device if on_cuda else None,
        store=dist.PrefixStore("group", job.store),
        rank=rank.rank,
        world_size=rank.world_size,
    )


def _leave_after(error: BaseException, lost: LostRankError | None, *, on_cuda: bool) -> None:
    """Leave the group after an error, unless other ranks may be waiting in one of its collectives.

    NCCL would then wait with them, and gloo would wait for a hung rank. In these cases the process
    ends without leaving its group, and torchrun ends the others.
    """
    waits = on_cuda or isinstance(lost, HungRankError)
    leaves = dist.is_initialized() and (not waits or _is_agreed(error))
    if lost is not None or leaves:
        forget_frames(error)
    if leaves:
        _leave_group()


def new_group(*, backend: str | None = None) -> dist.ProcessGroup:
    """Return another group of all ranks, with the timeout of the job's group; a collective.

    Args:
        backend: "gloo" for collectives on the host; None for the job's backend.
    """
    group = new_group_of(range(dist.get_world_size()), backend=backend)
    assert group is not None  # this rank is in it
    return group


def new_group_of(ranks: Iterable[int], *, backend: str | None = None) -> dist.ProcessGroup | None:
    """Return another group, of some ranks, or None on other ranks; a collective of all ranks."""
    # Without an explicit timeout, torch would give the group one of 30 minutes.
    group = dist.new_group(list(ranks), backend=backend, timeout=_group_timeout)
    if not isinstance(group, dist.ProcessGroup):
        return None
    _further_groups.append(group)
    return group


def leave_group(group: dist.ProcessGroup) -> None:
    """Leave a group of `new_group_of` before the job ends."""
    _further_groups.remove(group)
    dist.destroy_process_group(group)


@contextmanager
def _further_groups_end() -> Iterator[None]:
    """Leave the additional groups of a block at its end, because their threads would run on.

    After an error that only some ranks raise, the groups are not left, because other ranks may be
    in one of their collectives.
    """
    first = len(_further_groups)
    try:
        yield
    except BaseException as error:
        if not _is_agreed(error):
            first = len(_further_groups)
        raise
    finally:
        for group in _further_groups[first:]:
            leave_group(group)


def _is_agreed(error: BaseException) -> bool:
    """Return whether all ranks of the job raise this error."""
    return isinstance(error.__cause__, RankError) and error.__cause__.on_all_ranks


def _prepare_device(rank: Rank) -> None:
    if rank.device.type != "cuda":
        keep_freed_memory()
        return
    num_gpus = torch.cuda.device_count()
    if rank.local_rank >= num_gpus:
        raise ConfigError(
            f"rank {rank.rank} is number {rank.local_rank} on its host and finds {num_gpus} "
            f"GPUs; start at most {num_gpus} ranks a host, or show each rank all GPUs"
        )
    torch.cuda.set_device(rank.device)
    # The default of training; a run sets the value in its config.
    torch.backends.cuda.matmul.allow_tf32 = True


def _leave_group() -> None:
    if torch.cuda.is_initialized():
        gc.collect()  # models are in reference cycles, and NCCL waits for their CUDA graphs
    dist.destroy_process_group()
    _further_groups.clear()
    # Sharded modules hold the group in reference cycles. A gloo thread that outlives the
    # interpreter aborts the process when it next wants the GIL.
    gc.collect()


def detect_topology(
    settings: TopologySettings | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    rank: Rank | None = None,
) -> Topology:
    """Return the topology of this job, with the memory that is free on this rank's device.

    Args:
        settings: memory and bandwidths from a config; its ranks are replaced by the job's.
        group: group of the ranks; None for all ranks of the job.
        rank: this process; None for `rank_from_environment()`.

    Raises:
        ConfigError: `reserved_gib` leaves nothing for tables.
    """
    rank = rank or rank_from_environment()
    world_size = dist.get_world_size(group) if dist.is_initialized() else rank.world_size
    ranks = dataclasses.replace(
        settings or TopologySettings(),
        world_size=world_size,
        ranks_per_host=ranks_per_host(rank, world_size),
        compute_device=rank.device.type,
    )
    return ranks.topology(
        free_bytes(rank.device, rank.local_world_size), column_limit=column_limit(rank.device.type)
    )


def ranks_per_host(rank: Rank, world_size: int) -> int:
    """Return a group's number of ranks per host; all ranks if hosts have different numbers."""
    per_host = min(rank.local_world_size, world_size)
    return world_size if world_size % per_host else per_host


def has_core_for_each(rank: Rank) -> bool:
    """Return whether every thread of a host's ranks has its own core."""
    return rank.local_world_size * torch.get_num_threads() <= num_cores()
