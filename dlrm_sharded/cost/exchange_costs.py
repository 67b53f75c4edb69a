"""Costs per byte of the exchanges of a step, for the search and for the lower bound.

The time of an exchange depends on the volumes of all ranks at once, through maxima.
`ExchangeCosts` replaces it by costs of a byte that hold near even volumes, where good plans are,
and `LeastExchangeCosts` by lower bounds of the costs for all volumes. docs/notes/lower_bound.md
proves the properties that the bound needs (L3 and L7).

Letters: W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.communication import (
    EXCHANGES,
    HARDLY_ANY,
    STEP_EXCHANGES,
    CommunicationModel,
)
from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS, Hosts
from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.plans.plan_cost import FWD_COMM

EVEN_BYTES, STEP_BYTES = 1e6, 1e3
"""Volume of every rank at which the slopes are taken, and the step of the difference quotient."""


@dataclass(frozen=True, slots=True)
class ReduceCosts:
    """Costs of the reductions of a step within a group, on each of its ranks.

    They also describe the all-reduce of gradients, which has as many bytes as a rank's replicas.

    Args:
        fixed_ms: time of the reductions of the group that does not depend on their bytes.
        byte_ms: time of a byte that each rank of the group sends to every other one.
        shard_ms: time of each table in row blocks.
    """

    fixed_ms: float
    byte_ms: float
    shard_ms: float

    @classmethod
    def in_group(cls, model: CommunicationModel, group: Hosts) -> ReduceCosts:
        """Return the costs of the reductions in a group, see `Hosts.group`."""
        # the times are linear in volumes and shards, so differences are costs
        volumes = np.array([0.0, EVEN_BYTES, 0.0])
        num_shards = np.array([HARDLY_ANY, HARDLY_ANY, 1.0])
        by_kind = [model.reduce_ms(kind, volumes, num_shards, group) for kind in STEP_EXCHANGES]
        fixed_ms, with_bytes_ms, with_table_ms = np.sum(by_kind, axis=0).tolist()
        return cls(fixed_ms, (with_bytes_ms - fixed_ms) / EVEN_BYTES, with_table_ms - fixed_ms)

    @classmethod
    def of_gradients(cls, model: CommunicationModel, hosts: Hosts) -> ReduceCosts:
        """Return the costs of the all-reduce of gradients; `byte_ms` is per byte of replicas."""
        num_bytes = np.array([HARDLY_ANY, EVEN_BYTES])
        fixed_ms, with_bytes_ms = model.all_reduce_ms(num_bytes, hosts).tolist()
        return cls(fixed_ms, (with_bytes_ms - fixed_ms) / EVEN_BYTES, 0.0)


@dataclass(frozen=True, slots=True)
class ExchangeCosts:
    """Costs of both all-to-alls of a step together, near even volumes.

    A volume is what a rank exchanges with every other one, in bytes. The time of a rank is about

        fixed_ms + shard_ms * (shards of all ranks) + own_byte_ms * (its volume)
        + any_byte_ms * (sum of volumes) + busiest_rank_byte_ms * (largest volume)
        + busiest_host_byte_ms * (largest sum of volumes of a host)

    which is exact for even volumes and approximate for volumes that are nearly even.

    Args:
        any_byte_ms: time that every rank pays for a byte of any rank: the rest of `even_byte_ms`.
        even_byte_ms: time of a byte on every rank. No volumes of the same sum have a smaller mean
            over ranks, as no term depends on a rank's number (Jensen's inequality).
        sequences: how many bytes of bags a byte of whole sequences and a byte of their row blocks
            count as, see `CommunicationModel`; at even volumes, of all exchanges together.
        reduces: costs of row blocks, by the size of their groups.
        gradients: costs of replicas.
    """

    fixed_ms: float
    shard_ms: float
    even_byte_ms: float
    own_byte_ms: float
    busiest_rank_byte_ms: float
    busiest_host_byte_ms: float
    any_byte_ms: float
    reduces: Mapping[int, ReduceCosts]
    gradients: ReduceCosts
    num_ranks: int
    sequences: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def from_model(cls, model: CommunicationModel, hosts: Hosts) -> ExchangeCosts:
        """Take the costs from the model's times at even volumes and from its slopes there."""
        size, per_host = hosts.world_size, hosts.ranks_per_host
        even = _even_byte_ms(model, hosts)
        weights = even if even.any() else None
        whole, blocks = np.average(model.sequences, axis=0, weights=weights).tolist()
        exchanges = _StepExchanges(model, hosts)
        fixed_ms = float(exchanges.times_ms(np.zeros(size))[0])
        with_shards_ms = float(exchanges.times_ms(np.zeros(size), num_shards=1.0)[0])
        even_byte_ms = (float(exchanges.even_ms[0]) - fixed_ms) / EVEN_BYTES
        own_byte, busiest_rank, busiest_host = exchanges.uneven_costs()
        others_ms = own_byte + busiest_rank + busiest_host * per_host
        return cls(
            fixed_ms=fixed_ms,
            shard_ms=(with_shards_ms - fixed_ms) / size,
            even_byte_ms=even_byte_ms,
            own_byte_ms=own_byte,
            busiest_rank_byte_ms=busiest_rank,
            busiest_host_byte_ms=busiest_host,
            any_byte_ms=(even_byte_ms - others_ms) / size,
            reduces={
                group_size: ReduceCosts.in_group(model, hosts.group(group_size))
                for group_size in {size, per_host} - {1}
            },
            gradients=ReduceCosts.of_gradients(model, hosts),
            num_ranks=size,
            sequences=(whole, blocks),
        )


@dataclass(frozen=True, slots=True)
class _StepExchanges:
    """Both all-to-alls of a step as one function of the volumes, and its slopes at even ones.

    The function is piecewise linear and its kinks are where ranks or hosts draw level, as all of
    them do at even volumes. A difference quotient with a small step on one side of such a kink is
    therefore the slope on that side, up to rounding. As times are convex, no slope farther out in
    the same direction is smaller.
    """

    model: CommunicationModel
    hosts: Hosts
    kinds: Sequence[str] = STEP_EXCHANGES

    @property
    def even_ms(self) -> Floats:
        """[W], times at even volumes."""
        return self.times_ms(np.full(self.hosts.world_size, EVEN_BYTES))

    def times_ms(self, volume: Floats, num_shards: float = 0.0) -> Floats:
        """Return [W], times at volumes [W] with `num_shards` on every rank."""
        counts = np.full_like(volume, num_shards + HARDLY_ANY)
        by_kind = [
            self.model.all_to_all_ms(kind, volume[None], counts[None], self.hosts)[0]
            for kind in self.kinds
        ]
        return np.sum(by_kind, axis=0)

    def uneven_costs(self) -> tuple[float, float, float]:
        """Return the costs of a byte on the rank itself, the busiest rank and the busiest host."""
        size, per_host = self.hosts.world_size, self.hosts.ranks_per_host
        first, first_host = slice(0, 1), slice(0, per_host)
        others = slice(1, None) if size > 1 else slice(None)
        # Rank 0 has less than the others, so it is not the busiest, and what they save is the cost
        # of a byte of any rank. Ranks on its own and on other hosts may differ: the least counts.
        any_byte = float(self._slopes(first, -STEP_BYTES)[others].min())
        # Rank 0 has more: it is the busiest rank on the busiest host, and the others wait for it.
        more = self._slopes(first, STEP_BYTES)
        busiest = float(more[others].min()) - any_byte
        busiest_host = 0.0
        if 1 < per_host < size:
            # All ranks of host 0 have more. Other hosts' ranks then pay once for the busiest rank
            # but for every rank of the busiest host; `busiest` has each of the two once.
            host_more = self._slopes(first_host, STEP_BYTES)[per_host:]
            waiting = float(host_more.min() - per_host * any_byte)
            busiest_host = max((waiting - busiest) / (per_host - 1), 0.0)
        busiest_rank = max(busiest - busiest_host, 0.0)
        # Only rank 0 pays for its own extra bytes.
        own_byte = max(float(more[0]) - any_byte - busiest_rank - busiest_host, 0.0)
        return own_byte, busiest_rank, busiest_host

    def _slopes(self, ranks: slice, step_bytes: float) -> Floats:
        """Return [W], ms per byte that each of `ranks` has more than the even volume, or less."""
        volume = np.full(self.hosts.world_size, EVEN_BYTES)
        volume[ranks] += step_bytes
        return (self.times_ms(volume) - self.even_ms) / step_bytes


@dataclass(frozen=True, slots=True)
class LeastExchangeCosts:
    """Lower bounds of the costs of a byte, on any rank: L7 of docs/notes/lower_bound.md.

    With volumes v, their sum S and largest V, rank r's exchanges take at least
    fixed_ms + own_byte_ms * v[r] + any_byte_ms * S + busiest_byte_ms * (V - S / W).

    Args:
        sequences: how many bytes of bags a byte of whole sequences and a byte of their row blocks
            count as; no more than in any of these costs, or in the cost of even volumes.
    """

    own_byte_ms: float
    any_byte_ms: float
    busiest_byte_ms: float
    sequences: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def from_model(cls, model: CommunicationModel, hosts: Hosts) -> LeastExchangeCosts:
        """Add up the lower limits of all `EXCHANGE_TERMS`."""
        if hosts.world_size == 1:
            return cls(0.0, 0.0, 0.0)
        by_kind = np.array([_least_mb_ms(model, kind, hosts) for kind in STEP_EXCHANGES])
        own_mb_ms, any_mb_ms, busiest_mb_ms = by_kind.sum(axis=0).tolist()
        # A rank's volume is at most the sum, so a negative cost of its own lowers that of the sum.
        any_mb_ms += min(own_mb_ms, 0.0)
        costs = (max(own_mb_ms, 0.0) / 1e6, any_mb_ms / 1e6, busiest_mb_ms / 1e6)
        return cls(*costs, _least_counts(model, hosts, by_kind))


def _least_mb_ms(model: CommunicationModel, kind: str, hosts: Hosts) -> tuple[float, float, float]:
    """Return the least costs of a MB in one exchange: of a rank's own, of any, of the busiest."""
    size, per_host = hosts.world_size, hosts.ranks_per_host
    links = (
        ("intra", per_host - 1, hosts.intra_ms_per_mb),
        ("inter", size - per_host, hosts.inter_ms_per_mb),
    )
    num_hosts = size // per_host
    # a rank's own vectors go out in the forward pass, and their gradients come in
    own_way, other_way = ("out", "in") if kind == FWD_COMM else ("in", "out")
    weights = model.exchange[EXCHANGES.index(kind)].tolist()
    weight = dict(zip(EXCHANGE_TERMS, weights, strict=True))
    own_mb_ms, any_mb_ms, busiest_mb_ms = weight["own_bytes"] * size, weight["all_bytes"], 0.0
    for link, peers, ms_per_mb in links:
        # the busier direction takes no less time than the direction of the rank's own bytes
        own_mb_ms += (weight[f"{own_way}_{link}"] + weight[f"busier_{link}"]) * peers * ms_per_mb
        # a maximum over ranks or hosts is no less than their mean
        maxima = sum(weight[f"max_{term}_{link}"] for term in ("out", "in", "busier"))
        maxima = (maxima + weight["max_both_links"]) / size
        any_mb_ms += (maxima + weight[f"host_{link}"] / num_hosts) * peers * ms_per_mb
        # some rank sends, or gets, the largest volume; own volumes do not go the other way
        own_maxima = sum(weight[f"max_{term}_{link}"] for term in (own_way, "busier"))
        busiest_mb_ms += (own_maxima + weight["max_both_links"]) * peers * ms_per_mb
        # A rank that holds everything gets nothing from others. Only if all others are
        # behind one link, what it gets is known: all that is not its own.
        if peers == size - 1:
            own_mb_ms -= weight[f"{other_way}_{link}"] * ms_per_mb
            any_mb_ms += weight[f"{other_way}_{link}"] * ms_per_mb
    return own_mb_ms, any_mb_ms, busiest_mb_ms


def _even_byte_ms(model: CommunicationModel, hosts: Hosts) -> Floats:
    """Return [2], the cost of a byte on every rank in each of `STEP_EXCHANGES`."""
    each = [_StepExchanges(model, hosts, [kind]) for kind in STEP_EXCHANGES]
    empty = np.zeros(hosts.world_size)
    even: Floats = np.array([float((one.even_ms - one.times_ms(empty))[0]) for one in each])
    return even / EVEN_BYTES


def _least_counts(model: CommunicationModel, hosts: Hosts, by_kind: Floats) -> tuple[float, float]:
    """Return `LeastExchangeCosts.sequences`: L16 of docs/notes/lower_bound.md.

    Args:
        by_kind: [2, 3], see `_least_mb_ms`.
    """
    counts, (own, of_any, busiest) = model.sequences, by_kind.T
    costs = [own, of_any - busiest / hosts.world_size, busiest, _even_byte_ms(model, hosts)]
    counted, sums = [cost @ counts for cost in costs], [float(p.sum()) for p in costs]
    if sums[0] <= 0.0:  # a negative cost of its own counts for everything, see `from_model`
        counted[1], sums[1] = counted[1] + np.minimum(counted[0], 0.0), sums[1] + sums[0]
    means = [part / total for part, total in zip(counted, sums, strict=True) if total > 0.0]
    # times never fall with volumes, so the lower count of both exchanges is a lower bound, too
    fewest = counts.min(axis=0)
    whole, blocks = np.maximum(np.min([*means, counts.max(axis=0)], axis=0), fewest).tolist()
    return whole, blocks
