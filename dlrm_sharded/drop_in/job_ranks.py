"""The ranks of a job that torchrun started, or a launcher that sets none of its variables."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from typing import Any

import torch.distributed as dist

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.task import Topology
from dlrm_sharded.ranks.agreement import all_or_none
from dlrm_sharded.ranks.devices import column_limit
from dlrm_sharded.ranks.distributed import Rank, device_of, rank_from_environment, ranks_per_host

log = logging.getLogger(__name__)


def rank_in_group(group: dist.ProcessGroup | None = None) -> Rank:
    """Return this process as a rank of a job from any launcher; all ranks call it together.

    If torchrun has not said on which hosts the ranks are, ranks with the same hostname share one.

    Args:
        group: ranks that call it together; None for all ranks of the job.

    Raises:
        ConfigError: as in `rank_from_environment`, on any rank.
    """
    with all_or_none(group=group):
        rank = rank_from_environment()
    found: list[Any] = [None] * dist.get_world_size(group)
    is_known = "LOCAL_WORLD_SIZE" in os.environ
    dist.all_gather_object(found, (socket.gethostname(), is_known), group=group)
    if all(is_known for _, is_known in found):
        return rank
    hosts, place = [host for host, _ in found], dist.get_rank(group)
    local_rank, per_host = hosts[:place].count(hosts[place]), hosts.count(hosts[place])
    if hosts != [host for host in dict.fromkeys(hosts) for _ in range(per_host)]:
        per_host = len(hosts)
        if place == 0:
            log.warning(
                "the ranks count as ranks of one host, because their hosts are, in rank order, %s; "
                "start as many successive ranks on each host",
                ", ".join(hosts),
            )
    return dataclasses.replace(
        rank, local_rank=local_rank, local_world_size=per_host, device=device_of(local_rank)
    )


def check_topology(topology: Topology, rank: Rank, *, group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError if a topology differs from a group in ranks, hosts, device or columns."""
    num_ranks = dist.get_world_size(group)
    num_hosts = num_ranks // ranks_per_host(rank, num_ranks)
    columns = topology.max_shard_columns
    found = {
        "ranks": (topology.world_size, num_ranks),
        "hosts": (topology.world_size // topology.ranks_per_host, num_hosts),
        "device": (topology.compute_device, rank.device.type),
        "columns of a shard": (columns, column_limit(topology.compute_device) or columns),
    }
    differ = [f"{key} {one}, not {other}" for key, (one, other) in found.items() if one != other]
    if differ:
        raise ConfigError(
            f"the topology differs from that of the job ({'; '.join(differ)}); leave it out "
            "for the ranks of the job, or plan for others without a process group"
        )
