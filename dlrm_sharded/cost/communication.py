"""Exchanges between ranks: one model of their times for any number of ranks and hosts.

A rank's time in an all-to-all is a weighted sum, with nonnegative weights, of the causes of delay:
its own bytes, those of the busiest rank and of the busiest host, and the number of peers, each for
the links within a host and between hosts. No term depends on a rank's number, and
the world size is only a number in the terms, where NeuroShard (arXiv:2305.01868, sec. 3.2) has one
net per world size that reads the ranks in their order.

Letters: N plans, W ranks, F terms, P parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlrm_sharded.cost.exchange_terms import (
    EXCHANGE_TERMS,
    LINKS,
    REDUCE_TERMS,
    Hosts,
    exchange_terms,
    reduce_terms,
)
from dlrm_sharded.cost.precision_conversions import ConversionTimes
from dlrm_sharded.cost.workload import Exchange, Floats, Indices, Workload
from dlrm_sharded.plans.plan_cost import BWD_COMM, DIRECTIONS, FWD_COMM, INPUT_DIST
from dlrm_sharded.plans.precision import EXCHANGE_BYTES, ExchangePrecision

STEP_EXCHANGES = (FWD_COMM, BWD_COMM)
"""Exchanges that are part of a plan's cost: pooled vectors, and their gradients."""

EXCHANGES = (*STEP_EXCHANGES, INPUT_DIST)
"""All exchanges that are predicted; the last one redistributes the ids before the stages."""

EXCHANGE_PARTS = ("fixed", "bytes", "intra", "inter")
"""Parts of an exchange's time: what no byte causes, the bytes of a rank or of all ranks on any
link, and the bytes on each link."""

_PART_OF = {
    **dict.fromkeys(("one", "log2_ranks", "shards", "own_shards"), "fixed"),
    **dict.fromkeys((f"peers_{link}" for link in LINKS), "fixed"),
    **dict.fromkeys(("own_bytes", "all_bytes", "bytes", "max_both_links"), "bytes"),
}
"""Parts of terms; all others are named by their link."""


def _parts(terms: Sequence[str]) -> Indices:
    """Return [F], the index of the part that each term belongs to."""
    parts = (_PART_OF.get(term, term.rpartition("_")[2]) for term in terms)
    return np.array([EXCHANGE_PARTS.index(part) for part in parts])


_EXCHANGE_PART, _REDUCE_PART = _parts(EXCHANGE_TERMS), _parts(REDUCE_TERMS)
_FIXED = EXCHANGE_PARTS.index("fixed")

HARDLY_ANY = 1e-12
"""Number of shards, or of bytes, that adds no time: with exactly 0 there would be no exchange."""

REDUCED_SHARE = 0.5
"""Largest fraction of its numbers that a rank has after a reduce-scatter or before an all-gather:
1/2, for two ranks. More ranks have less, so their conversion time is at most overestimated."""


def one_byte_each() -> Floats:
    """Return `CommunicationModel.sequences` that count bytes of sequences like all others."""
    return np.ones((len(STEP_EXCHANGES), 2))


@dataclass(frozen=True, slots=True)
class CommunicationModel:
    """Times of the exchanges of a step.

    Args:
        exchange: [3, F], weights of `EXCHANGE_TERMS` for each of `EXCHANGES`.
        reduce: [3, F'], weights of `REDUCE_TERMS` for each of `EXCHANGES`.
        all_reduce: [F'], weights of `REDUCE_TERMS` for the all-reduce of the gradients of replicas,
            which is part of `bwd_comm`; the volume is of one of its two halves. None for the
            sum of a reduce-scatter and an all-gather, which a ring makes an all-reduce of.
        sequences: [2, 2], how many bytes of bags a byte of sequences counts as in each of
            `STEP_EXCHANGES`, for whole tables and for row blocks; the vectors of the latter are put
            in the order of their ids after the exchange.
    """

    exchange: Floats
    reduce: Floats
    all_reduce: Floats | None = None
    sequences: Floats = field(default_factory=one_byte_each)

    def at(self, even: object) -> CommunicationModel:
        """Return the model, which holds for all volumes; see `ExchangeCurves.at`."""
        return self

    def exchange_of(self, kind: str, workload: Workload) -> Exchange:
        """Return one of `EXCHANGES` of a workload, with sequences counted as `sequences` says."""
        if kind not in STEP_EXCHANGES:
            return workload.exchange(for_ids=True)
        counts = self.sequences[STEP_EXCHANGES.index(kind)]
        return workload.exchange(for_ids=False, sequences=counts)

    @property
    def all_reduce_weights(self) -> Floats:
        """[F'], weights of the all-reduce, measured or composed."""
        if self.all_reduce is not None:
            return self.all_reduce
        halves = [EXCHANGES.index(kind) for kind in STEP_EXCHANGES]
        return self.reduce[halves].sum(axis=0)

    def scaled(self, factors: Mapping[str, Floats | float]) -> CommunicationModel:
        """Return the model with the `EXCHANGE_PARTS` of each of `EXCHANGES` times factors [P]."""
        parts = np.array(
            [np.broadcast_to(factors[kind], len(EXCHANGE_PARTS)) for kind in EXCHANGES]
        )
        backward = parts[EXCHANGES.index(BWD_COMM)]
        return dataclasses.replace(
            self,
            exchange=self.exchange * parts[:, _EXCHANGE_PART],
            reduce=self.reduce * parts[:, _REDUCE_PART],
            all_reduce=self.all_reduce_weights * backward[_REDUCE_PART],
        )

    def with_precision(
        self, precision: ExchangePrecision, conversions: Mapping[str, ConversionTimes]
    ) -> CommunicationModel:
        """Return the model of exchanges in a precision; it still takes volumes in fp32 bytes.

        Args:
            conversions: times to convert numbers to each precision and back; 0 for others.
        """
        exchange, reduce = self.exchange.copy(), self.reduce.copy()
        for kind, direction in zip(STEP_EXCHANGES, DIRECTIONS, strict=True):
            i = EXCHANGES.index(kind)
            name, reduced = (getattr(p, direction) for p in (precision, precision.in_reductions))
            exchange[i, _EXCHANGE_PART != _FIXED] *= EXCHANGE_BYTES[name] / EXCHANGE_BYTES["fp32"]
            reduce[i, _REDUCE_PART != _FIXED] *= EXCHANGE_BYTES[reduced] / EXCHANGE_BYTES["fp32"]
            # A rank has the vectors of its own columns before the exchange and those of its samples
            # after it. Their gradients go the other way.
            times = conversions.get(name, ConversionTimes())
            exchange[i, EXCHANGE_TERMS.index("own_bytes")] += times.of_columns(direction)
            exchange[i, EXCHANGE_TERMS.index("all_bytes")] += times.of_samples(direction)
            times = conversions.get(reduced, ConversionTimes())
            byte_ms = times.of_columns(direction) + REDUCED_SHARE * times.of_samples(direction)
            if kind == FWD_COMM:  # gradients are gathered, not added up
                byte_ms += times.reduce
            reduce[i, REDUCE_TERMS.index("bytes")] += byte_ms
        # Gradients of replicas are averaged in fp32, even if the vectors are exchanged in less.
        return dataclasses.replace(
            self, exchange=exchange, reduce=reduce, all_reduce=self.all_reduce_weights
        )

    def parts_ms(self, kind: str, exchange: Exchange, hosts: Hosts) -> Floats:
        """Return [W, P], the `EXCHANGE_PARTS` of a time; they sum to `exchange_ms`."""
        parts = []
        for part in range(len(EXCHANGE_PARTS)):
            alone = CommunicationModel(
                self.exchange * (part == _EXCHANGE_PART),
                self.reduce * (part == _REDUCE_PART),
                self.all_reduce_weights * (part == _REDUCE_PART),
            )
            parts.append(alone.exchange_ms(kind, exchange, hosts))
        return np.column_stack(parts)

    def exchange_ms(self, kind: str, exchange: Exchange, hosts: Hosts) -> Floats:
        """Return [W], time of one of `EXCHANGES`: its all-to-all, then its reductions."""
        times = self.all_to_all_ms(kind, exchange.volume[None], exchange.num_shards[None], hosts)[0]
        times += max(exchange.num_launches - 1, 0) * self.launch_ms(kind, hosts)
        return times + self.reduces_ms(kind, exchange, hosts)

    def launch_ms(self, kind: str, hosts: Hosts) -> float:
        """Return the time of an all-to-all that carries nothing, which each module pays."""
        size = hosts.world_size
        empty, hardly_any = np.zeros((1, size)), np.full((1, size), HARDLY_ANY)
        return float(self.all_to_all_ms(kind, empty, hardly_any, hosts)[0, 0])

    def all_reduce_ms(self, num_bytes: Floats, hosts: Hosts) -> Floats:
        """Return [N], time of an all-reduce of gradients of `num_bytes` [N]; 0 for no bytes.

        Each rank sends 1 / W of the bytes to every other rank, in each half of the all-reduce.
        """
        if hosts.world_size == 1:
            return np.zeros_like(num_bytes)
        is_any = (num_bytes > 0).astype(np.float64)
        return reduce_terms(num_bytes / hosts.world_size, is_any, hosts) @ self.all_reduce_weights

    def all_to_all_ms(self, kind: str, volume: Floats, num_shards: Floats, hosts: Hosts) -> Floats:
        """Return [N, W], time of all-to-alls; zeros for one rank, or where nobody has a shard.

        Args:
            volume, num_shards: [N, W], bytes that each rank exchanges with every other one, and
                its shards.
        """
        times = np.zeros(volume.shape[::-1])
        if hosts.world_size > 1:
            weights = self.exchange[EXCHANGES.index(kind)].tolist()
            mb, shards = volume.T / 1e6, num_shards.T / 1e3
            terms = exchange_terms(mb, shards, hosts, sends_own=kind == FWD_COMM)
            for weight, term in zip(weights, terms, strict=True):
                if weight:  # most fitted weights are zero
                    times += weight * term
            times *= num_shards.sum(axis=1) > 0
        return times.T

    def reduces_ms(self, kind: str, exchange: Exchange, hosts: Hosts) -> Floats:
        """Return [W], time of all reductions of an exchange, gradients of replicas included."""
        times: Floats = np.zeros(hosts.world_size)
        if kind == BWD_COMM and exchange.replica_bytes:
            num_bytes = np.array([exchange.replica_bytes, HARDLY_ANY])
            times_ms = self.all_reduce_ms(num_bytes, hosts)
            times += times_ms[0] + (exchange.num_replica_launches - 1) * times_ms[1]
        for reduce in exchange.reduces:
            group = hosts.group(reduce.group_size)
            times += self.reduce_ms(kind, reduce.volume, reduce.num_shards, group)
            [more_ms] = self.reduce_ms(kind, np.zeros(1), np.array([HARDLY_ANY]), group)
            times += np.maximum(reduce.num_launches - 1, 0) * more_ms
        return times

    def reduce_ms(self, kind: str, volume: Floats, num_shards: Floats, group: Hosts) -> Floats:
        """Return [N], time of the reduction in one of `EXCHANGES` among the ranks of a group."""
        weights = self.reduce[EXCHANGES.index(kind)]
        return reduce_terms(volume, num_shards, group) @ weights


def with_stated(model: CommunicationModel, *, measured: Collection[str]) -> CommunicationModel:
    """Return the model with terms of bytes over bandwidth for the links that were not measured."""
    exchange, reduce = model.exchange.copy(), model.reduce.copy()
    all_reduce = model.all_reduce_weights.copy()
    for link in set(LINKS) - set(measured):
        exchange[:, EXCHANGE_TERMS.index(f"max_busier_{link}")] = 1.0
        reduce[:, REDUCE_TERMS.index(link)] = 1.0
        all_reduce[REDUCE_TERMS.index(link)] = 2.0  # both halves
    return dataclasses.replace(model, exchange=exchange, reduce=reduce, all_reduce=all_reduce)


STATED = with_stated(
    CommunicationModel(
        np.zeros((len(EXCHANGES), len(EXCHANGE_TERMS))),
        np.zeros((len(EXCHANGES), len(REDUCE_TERMS))),
    ),
    measured=(),
)
"""Exchanges that take as long as the bytes of the busiest rank take on its links."""
