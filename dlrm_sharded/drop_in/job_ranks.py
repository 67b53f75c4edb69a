"""The ranks of a job that anyone has started: torchrun, or what sets none of its variables."""

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
from dlrm_sharded.ranks.distributed import (
    Rank,
    device_of,
    rank_from_environment,
    ranks_per_host,
)

log = logging.getLogger(__name__)


def rank_in_group(group: dist.ProcessGroup | None = None) -> Rank:
    """Return this process as a rank of a job that anyone may have started; a collective.

    If torchrun has not said on which hosts the ranks are, those with one hostname share a host.

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
    per_host = hosts.count(hosts[place])
    if hosts != [hosts[i - i % per_host] for i in range(len(hosts))] or (
        len(set(hosts)) * per_host != len(hosts)
    ):
        per_host = len(hosts)
        if place == 0:
            log.warning(
                "the ranks are on %s in this order, and count as if they were on one host; start "
                "as many successive ranks on each host",
                ", ".join(hosts),
            )
    local_rank = hosts[:place].count(hosts[place])
    return dataclasses.replace(
        rank, local_rank=local_rank, local_world_size=per_host, device=device_of(local_rank)
    )


def check_topology(topology: Topology, rank: Rank, *, group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError if a topology has other ranks, hosts or devices than those of a group."""
    world_size = dist.get_world_size(group)
    given = (
        f"{topology.world_size} ranks",
        f"{topology.world_size // topology.ranks_per_host} hosts",
        topology.compute_device,
    )
    here = (
        f"{world_size} ranks",
        f"{world_size // ranks_per_host(rank, world_size)} hosts",
        rank.device.type,
    )
    if given != here:
        differ = [
            f"{one} (the job: {other})"
            for one, other in zip(given, here, strict=True)
            if one != other
        ]
        raise ConfigError(
            f"the topology is for {', '.join(differ)}; leave it out for the ranks of the job, or "
            "plan for others without a process group"
        )
