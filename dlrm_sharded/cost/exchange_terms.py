"""The time of an exchange is a weighted sum of these terms, for any number of ranks and hosts.

Letters: N plans, W ranks, F terms.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.plans.task import Topology

LINKS = ("intra", "inter")
"""Links between ranks of one host, and between ranks of different hosts."""

_LINK_TERMS = ("peers", "out", "in", "busier", "max_out", "max_in", "max_busier", "host")
EXCHANGE_TERMS = (
    "one",
    "log2_ranks",
    "shards",
    "own_shards",
    "own_bytes",
    "all_bytes",
    *(f"{term}_{link}" for link in ("intra", "inter") for term in _LINK_TERMS),
    "max_both_links",
)
"""Terms of an all-to-all's time on a rank.

Counts are in thousands and bytes in MB. A link's bytes are in ms where its bandwidth is stated.
"""

REDUCE_TERMS = (
    "one",
    "log2_ranks",
    "shards",
    "bytes",
    "peers_intra",
    "peers_inter",
    "intra",
    "inter",
)
"""Terms of a reduction's time (a reduce-scatter, an all-gather, or an all-reduce, which counts as
one shard), the same on all its ranks."""

ASSUMED_MS_PER_MB = 1.0
"""Time of a MB on a link whose bandwidth was neither measured nor stated: 1 GB/s."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The placement of ranks on hosts, and the time of a MB between ranks.

    Args:
        intra_ms_per_mb, inter_ms_per_mb: time of a MB that one rank sends in one direction; 1 where
            the link was measured, because the fitted weights are then in ms per MB.
    """

    world_size: int
    ranks_per_host: int
    intra_ms_per_mb: float = 1.0
    inter_ms_per_mb: float = 1.0

    @classmethod
    def from_topology(cls, topology: Topology, *, measured: Collection[str]) -> Hosts:
        """Return a topology's hosts, with its bandwidths for those `LINKS` not `measured`."""
        stated = (topology.intra_host_bytes_per_s, topology.inter_host_bytes_per_s)
        intra, inter = (
            1e9 / bandwidth if bandwidth and link not in measured else ASSUMED_MS_PER_MB
            for link, bandwidth in zip(LINKS, stated, strict=True)
        )
        return cls(topology.world_size, topology.ranks_per_host, intra, inter)

    def group(self, size: int) -> Hosts:
        """Return a group of `size` ranks by itself: all ranks, or those of one host."""
        return dataclasses.replace(
            self, world_size=size, ranks_per_host=min(size, self.ranks_per_host)
        )


def exchange_terms(
    mb: Floats, shards: Floats, hosts: Hosts, *, sends_own: bool
) -> Iterator[Floats]:
    """Yield the `EXCHANGE_TERMS` of all-to-alls: [W, N], or [1, N] if it is the same on all ranks.

    Args:
        mb: [W, N], MB that each rank exchanges with every other one.
        shards: [W, N], in thousands.
        sends_own: whether a rank sends its volume to the others (pooled vectors) or gets it from
            them (gradients, ids).
    """
    # ranks come first, so that sums and maxima over them run along the memory
    mb, per_host = np.ascontiguousarray(mb), hosts.ranks_per_host
    total_mb = mb.sum(axis=0, keepdims=True)
    host_mb = total_mb
    if per_host < hosts.world_size:
        by_host = mb.reshape(-1, per_host, mb.shape[1]).sum(axis=1)
        host_mb = np.repeat(by_host, per_host, axis=0)  # each rank has its host's sum
    one = np.ones_like(total_mb)
    yield one
    yield one * np.log2(hosts.world_size)
    yield shards.sum(axis=0, keepdims=True)
    yield shards
    yield mb * hosts.world_size
    yield total_mb
    both_links = np.zeros_like(mb)
    for peers, others_mb, ms_per_mb in (
        (per_host - 1, host_mb - mb, hosts.intra_ms_per_mb),
        (hosts.world_size - per_host, total_mb - host_mb, hosts.inter_ms_per_mb),
    ):
        if peers == 0:  # no rank is behind this link
            yield from itertools.repeat(np.zeros((1, 1)), len(_LINK_TERMS))
            continue
        # a rank's volume goes to each peer, and each peer's volume comes to the rank once
        own_ms, others_ms = mb * (peers * ms_per_mb), others_mb * ms_per_mb
        out, into = (own_ms, others_ms) if sends_own else (others_ms, own_ms)
        busier = np.maximum(out, into)
        both_links += busier
        yield one * (peers / 1e3)
        yield out
        yield into
        yield busier
        yield out.max(axis=0, keepdims=True)
        yield into.max(axis=0, keepdims=True)
        yield busier.max(axis=0, keepdims=True)
        # what the busiest host sends
        out_by_host = np.broadcast_to(out, mb.shape).reshape(-1, per_host, mb.shape[1])
        yield out_by_host.sum(axis=1).max(axis=0, keepdims=True)
    yield both_links.max(axis=0, keepdims=True)


def reduce_terms(volume: Floats, num_shards: Floats, hosts: Hosts) -> Floats:
    """Return [N, F], the `REDUCE_TERMS` of reductions; zeros where there are no shards.

    Args:
        volume: [N], bytes that each rank sends to every other one.
        num_shards: [N], shards of one rank.
    """
    mb = volume / 1e6
    there = (num_shards > 0).astype(np.float64)  # latency is paid only if there is a shard
    intra, inter = hosts.ranks_per_host - 1, hosts.world_size - hosts.ranks_per_host
    return np.stack(
        [
            there,
            there * np.log2(hosts.world_size),
            num_shards / 1e3,
            mb * hosts.world_size,
            there * intra / 1e3,
            there * inter / 1e3,
            mb * intra * hosts.intra_ms_per_mb,
            mb * inter * hosts.inter_ms_per_mb,
        ],
        axis=1,
    )
