"""What exchanges between ranks take: one model for any number of ranks and hosts.

A rank's time in an all-to-all is a weighted sum, with weights that are not negative, of what can
hold it up: its own bytes, the fullest rank's, the fullest host's, the number of peers, each for the
links within a host and between hosts. Nothing depends on a rank's number, and the world size is
only a number in the terms, where NeuroShard (arXiv:2305.01868, sec. 3.2) has one net per world
size that reads the ranks in their order.

Letters: N plans, W ranks, F terms.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.features import Exchange, Floats
from dlrm_sharded.task import Topology

STEP_EXCHANGES = ("fwd_comm", "bwd_comm")
"""Part of the cost; the redistribution of ids is not."""

EXCHANGES = (*STEP_EXCHANGES, "input_dist")
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
"""All-to-all, per rank: counts in thousands, bytes in MB, or in ms where a bandwidth is known."""

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
"""Reduce-scatter of row-wise tables: the same for all ranks."""


LINKS = ("intra", "inter")
"""Between ranks of one host, and of different ones."""

ASSUMED_MS_PER_MB = 1.0
"""1 GB/s: of a link that was neither measured nor stated."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """How ranks lie on hosts, and how bytes become time between them.

    Args:
        intra_ms_per_mb, inter_ms_per_mb: of one rank in one direction; 1 where the model was fitted
            to measurements of the link, whose weights then have the unit ms per MB.
    """

    world_size: int
    ranks_per_host: int
    intra_ms_per_mb: float = 1.0
    inter_ms_per_mb: float = 1.0

    @classmethod
    def of(cls, topology: Topology, *, measured: Collection[str]) -> Hosts:
        """The topology's, with its bandwidths for those of `LINKS` that were not measured."""
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
    volume: Floats, num_shards: Floats, hosts: Hosts, *, sends_own: bool
) -> Iterator[Floats]:
    """The `EXCHANGE_TERMS` of all-to-alls, one after the other: [N, W], or [N, 1] for all ranks.

    Args:
        volume: [N, W], bytes that each rank exchanges with every other one.
        num_shards: [N, W].
        sends_own: a rank sends its volume to the others (pooled vectors), or gets it from them
            (gradients, ids).
    """
    for term in _terms_by_rank(volume.T / 1e6, num_shards.T / 1e3, hosts, sends_own=sends_own):
        yield term.T


def _terms_by_rank(
    mb: Floats, shards: Floats, hosts: Hosts, *, sends_own: bool
) -> Iterator[Floats]:
    """[W, N] or [1, N]: ranks first, so that maxima over them run along the memory."""
    mb, per_host = np.ascontiguousarray(mb), hosts.ranks_per_host
    of_all = mb.sum(axis=0, keepdims=True)
    of_host = of_all
    if per_host < hosts.world_size:
        by_host = mb.reshape(-1, per_host, mb.shape[1]).sum(axis=1)
        of_host = np.repeat(by_host, per_host, axis=0)
    one = np.ones_like(of_all)
    yield one
    yield one * np.log2(hosts.world_size)
    yield shards.sum(axis=0, keepdims=True)
    yield shards
    yield mb * hosts.world_size
    yield of_all
    both_links = np.zeros_like(mb)
    for peers, others, ms_per_mb in (
        (per_host - 1, of_host - mb, hosts.intra_ms_per_mb),
        (hosts.world_size - per_host, of_all - of_host, hosts.inter_ms_per_mb),
    ):
        if peers == 0:
            yield from itertools.repeat(np.zeros((1, 1)), len(_LINK_TERMS))
            continue
        own, foreign = mb * (peers * ms_per_mb), others * ms_per_mb
        out, into = (own, foreign) if sends_own else (foreign, own)
        busier = np.maximum(out, into)
        both_links += busier
        yield one * (peers / 1e3)
        yield out
        yield into
        yield busier
        yield out.max(axis=0, keepdims=True)
        yield into.max(axis=0, keepdims=True)
        yield busier.max(axis=0, keepdims=True)
        by_host = np.broadcast_to(out, mb.shape).reshape(-1, per_host, mb.shape[1])
        yield by_host.sum(axis=1).max(axis=0, keepdims=True)
    yield both_links.max(axis=0, keepdims=True)


def reduce_terms(volume: Floats, num_shards: Floats, hosts: Hosts) -> Floats:
    """[N, F], the `REDUCE_TERMS` of reduce-scatters and all-gathers; zeros where there is none.

    Args:
        volume: [N], bytes that each rank sends to every other one.
        num_shards: [N], of one rank.
    """
    mb = volume / 1e6
    there = (num_shards > 0).astype(np.float64)
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


@dataclass(frozen=True, slots=True)
class CommunicationModel:
    """The exchanges of a step.

    Args:
        exchange: [3, F], weights of `EXCHANGE_TERMS` for each of `EXCHANGES`.
        reduce: [3, F'], weights of `REDUCE_TERMS`, likewise.
    """

    exchange: Floats
    reduce: Floats

    def exchange_ms(self, kind: str, exchange: Exchange, hosts: Hosts) -> Floats:
        """[W], time of one of `EXCHANGES`: its all-to-all, then its reductions."""
        times = self.all_to_all_ms(kind, exchange.volume[None], exchange.num_shards[None], hosts)[0]
        return times + self.reduces_ms(kind, exchange, hosts)

    def all_to_all_ms(self, kind: str, volume: Floats, num_shards: Floats, hosts: Hosts) -> Floats:
        """[N, W], time of all-to-alls; zeros for one rank, and where nobody has a shard.

        Args:
            volume, num_shards: [N, W], see `exchange_terms`.
        """
        i = EXCHANGES.index(kind)
        times = np.zeros(volume.shape[::-1]).T
        if hosts.world_size == 1:
            return times
        terms = exchange_terms(volume, num_shards, hosts, sends_own=kind == "fwd_comm")
        for weight, term in zip(self.exchange[i].tolist(), terms, strict=True):
            if weight:
                times += weight * term
        times *= num_shards.sum(axis=1, keepdims=True) > 0
        return times

    def reduces_ms(self, kind: str, exchange: Exchange, hosts: Hosts) -> Floats:
        """[W], time of all reductions of an exchange."""
        times: Floats = np.zeros(hosts.world_size)
        for reduce in exchange.reduces:
            group = hosts.group(reduce.group_size)
            times += self.reduce_ms(kind, reduce.volume, reduce.num_shards, group)
        return times

    def reduce_ms(self, kind: str, volume: Floats, num_shards: Floats, group: Hosts) -> Floats:
        """[N], time of reduce-scatters within a group, or of what they are in another exchange."""
        weights = self.reduce[EXCHANGES.index(kind)]
        times: Floats = reduce_terms(volume, num_shards, group) @ weights
        return times


@dataclass(frozen=True, slots=True)
class ReducePrices:
    """What the reductions within one size of groups take in a step, on a rank of a group.

    Args:
        fixed_ms: if there are any.
        byte_ms: for a byte that each rank of the group sends to every other one.
        shard_ms: for each table.
    """

    fixed_ms: float
    byte_ms: float
    shard_ms: float

    @classmethod
    def in_group(cls, model: CommunicationModel, group: Hosts) -> ReducePrices:
        some_bytes, hardly_any = 1e6, 1e-12  # no shards at all would take no time
        volumes = np.array([0.0, some_bytes, 0.0])
        num_shards = np.array([hardly_any, hardly_any, 1.0])
        by_kind = [model.reduce_ms(kind, volumes, num_shards, group) for kind in STEP_EXCHANGES]
        fixed_ms, with_bytes_ms, with_table_ms = np.sum(by_kind, axis=0).tolist()
        return cls(fixed_ms, (with_bytes_ms - fixed_ms) / some_bytes, with_table_ms - fixed_ms)


@dataclass(frozen=True, slots=True)
class ExchangePrices:
    """What the exchanges of pooled vectors and their gradients take together, in ms.

    For volumes that are even, and for small differences from them; the time of a rank is `fixed`
    and `shard` for each column shard of all ranks, and for the bytes that ranks exchange with every
    other one, `own` for its own, `shared` for those of all ranks, `fullest` for the fullest rank's,
    `fullest_host` for those of the fullest host's ranks.

    Args:
        even: per byte of every rank; no volumes of the same sum have a smaller mean over ranks, as
            all terms are convex and none depends on a rank's number (Jensen's inequality).
        reduces: prices of row blocks, by the size of their groups.
    """

    fixed: float
    shard: float
    even: float
    own: float
    fullest: float
    fullest_host: float
    reduces: Mapping[int, ReducePrices]
    num_ranks: int
    num_hosts: int

    @property
    def shared(self) -> float:
        """Paid by all ranks for a byte of any; with it, even volumes take what `even` says."""
        of_host = self.fullest_host * self.num_ranks / self.num_hosts
        return (self.even - self.own - self.fullest - of_host) / self.num_ranks

    @classmethod
    def of(cls, model: CommunicationModel, hosts: Hosts) -> ExchangePrices:
        size, per_host = hosts.world_size, hosts.ranks_per_host
        some = 1e6

        def times(volume: Floats, shards: float = 0.0) -> Floats:
            counts = np.full_like(volume, shards + 1e-12)  # not nothing, which takes no time
            by_kind = [
                model.all_to_all_ms(kind, volume[None], counts[None], hosts)[0]
                for kind in STEP_EXCHANGES
            ]
            both: Floats = np.sum(by_kind, axis=0)
            return both

        def changed(first: slice, by: float) -> Floats:
            """Per byte by which the volumes of some ranks were changed."""
            volume = np.full(size, some)
            volume[first] += by
            return (times(volume) - even) / by

        even = times(np.full(size, some))
        fixed = times(np.zeros(size))[0]
        step = 1e-3 * some
        others = slice(1, None) if size > 1 else slice(None)
        total = float(changed(slice(0, 1), -step)[others].min())
        more = changed(slice(0, 1), step)
        fullest = float(more[others].min()) - total
        fullest_host = 0.0
        if 1 < per_host < size:
            host = changed(slice(0, per_host), step)[per_host:].min() - per_host * total
            fullest_host = max(float(host - fullest) / (per_host - 1), 0.0)
        fullest = max(fullest - fullest_host, 0.0)
        return cls(
            num_ranks=size,
            num_hosts=size // per_host,
            fixed=float(fixed),
            shard=float(times(np.zeros(size), 1.0)[0] - fixed) / size,
            even=float(even[0] - fixed) / some,
            own=max(float(more[0]) - total - fullest - fullest_host, 0.0),
            fullest=fullest,
            fullest_host=fullest_host,
            reduces={
                group_size: ReducePrices.in_group(model, hosts.group(group_size))
                for group_size in {size, per_host} - {1}
            },
        )


def with_stated(model: CommunicationModel, *, measured: Collection[str]) -> CommunicationModel:
    """The model with the fullest rank's bytes over the bandwidth for links not measured."""
    exchange, reduce = model.exchange.copy(), model.reduce.copy()
    for link in set(LINKS) - set(measured):
        exchange[:, EXCHANGE_TERMS.index(f"max_busier_{link}")] = 1.0
        reduce[:, REDUCE_TERMS.index(link)] = 1.0
    return CommunicationModel(exchange, reduce)


UNMEASURED = CommunicationModel(
    np.zeros((len(EXCHANGES), len(EXCHANGE_TERMS))), np.zeros((len(EXCHANGES), len(REDUCE_TERMS)))
)
