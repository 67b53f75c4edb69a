"""Times of exchanges among GPUs as curves, and the linear model that is right for one task.

The time of an exchange rises more slowly than its bytes: small messages cost latency, and only
large ones reach a link's bandwidth. The search and the lower bound need times that are linear in
the volumes. A task fixes the volume of a rank if all have the same, so the curves are replaced by
lines that meet them there: `ExchangeCurves.at` takes the value of a curve at the even volume, and
its slope between half and twice that volume.

Between hosts there are no curves, but figures. A GPU's adapter sends at `ADAPTER_SHARE` of its
nominal bandwidth, and every doubling of the hosts adds `HOST_DOUBLING_MS`. In an all-to-all, each
rank sends through its adapter what is for other hosts, while NVLink carries the rest; the slower of
the two counts. In a reduction, which NCCL runs as a ring, a byte crosses to each host once, so the
adapters of a host share the bytes of one rank; no public figure confirms that.

Letters: W ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from dlrm_sharded.cost.communication import (
    EXCHANGE_PARTS,
    EXCHANGES,
    CommunicationModel,
    one_byte_each,
)
from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS, REDUCE_TERMS, Hosts
from dlrm_sharded.cost.workload import FLOAT_BYTES, ID_BYTES, Floats, Workload
from dlrm_sharded.hardware.gpus.collectives import HostCollectives
from dlrm_sharded.plans.plan_cost import BWD_COMM, FWD_COMM, INPUT_DIST
from dlrm_sharded.plans.task import ShardingTask

ADAPTER_SHARE = 0.95
"""Share of an adapter's nominal bandwidth that an all-to-all reaches: 46 to 49 of 50 GB/s in issues
267 and 290 of github.com/NVIDIA/nccl-tests; DeepEP has 43, 58 and 51 GB/s on 16, 32 and 64 H800."""

HOST_DOUBLING_MS = 0.023
"""Latency that each doubling of the hosts adds: DeepEP's low-latency mode takes 77 us on 8 GPUs and
194 us on 256 (github.com/deepseek-ai/DeepEP, docs/legacy.md)."""

SLOPE_FACTOR = 2.0
"""A line has its curve's mean slope from the even volume over this to that volume times this."""

REPLICA_BYTES = 16e6
"""Bytes of gradients at which the line of the all-reduce meets its curve; tables that pay off as
replicas are small, however much the task exchanges otherwise."""

LEAST_BYTES = 1.0
"""Smallest volume at which a line meets its curve, for tasks that exchange nothing."""

RING = {FWD_COMM: "reduce_scatter", BWD_COMM: "all_gather"}
"""Collectives of row blocks. Ids reach row blocks by an all-to-all."""


@dataclass(frozen=True, slots=True)
class EvenVolumes:
    """The volumes that an even plan of a task exchanges, and the ranks that exchange them.

    Args:
        volume, id_volume: bytes that a rank exchanges with every other one, of pooled vectors and
            of ids.
        intra_gb_per_s, inter_gb_per_s: stated bandwidths of the links; None for nominal ones.
    """

    world_size: int
    ranks_per_host: int
    volume: float
    id_volume: float
    intra_gb_per_s: float | None = None
    inter_gb_per_s: float | None = None

    @classmethod
    def of_task(cls, task: ShardingTask) -> EvenVolumes:
        """Return the volumes of a task whose tables are spread evenly over the ranks."""
        topology, size = task.topology, task.topology.world_size
        numbers = sum(table.embedding_dim * table.vectors_per_sample for table in task.tables)
        num_ids = sum(table.pooling_factor + table.num_features for table in task.tables)
        intra, inter = topology.intra_host_bytes_per_s, topology.inter_host_bytes_per_s
        return cls(
            world_size=size,
            ranks_per_host=topology.ranks_per_host,
            volume=max(task.batch_size * numbers * FLOAT_BYTES / size**2, LEAST_BYTES),
            id_volume=max(task.batch_size * num_ids * ID_BYTES / size**2, LEAST_BYTES),
            intra_gb_per_s=None if intra is None else intra / 1e9,
            inter_gb_per_s=None if inter is None else inter / 1e9,
        )

    @classmethod
    def of_workload(cls, workload: Workload, hosts: Hosts) -> EvenVolumes:
        """Return the mean volumes of a workload."""
        size = hosts.world_size
        vector_bytes = workload.vector_bytes().sum() / size
        num_ids = (workload.num_ids + workload.num_bags).sum()
        return cls(
            world_size=size,
            ranks_per_host=hosts.ranks_per_host,
            volume=max(float(vector_bytes), LEAST_BYTES),
            id_volume=max(float(num_ids) * ID_BYTES / size**2, LEAST_BYTES),
        )


def _ones() -> dict[str, Floats]:
    return {kind: np.ones(len(EXCHANGE_PARTS)) for kind in EXCHANGES}


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeCurves:
    """Times of all exchanges among GPUs of one kind, in one host and between hosts.

    Args:
        factors: factors of the `EXCHANGE_PARTS` of each of `EXCHANGES`, fitted to measurements.
        sequences: see `CommunicationModel`.
    """

    host: HostCollectives
    factors: Mapping[str, Floats] = field(default_factory=_ones)
    sequences: Floats = field(default_factory=one_byte_each)

    def all_to_all_ms(self, volume: float, even: EvenVolumes) -> tuple[float, str]:
        """Return the time of an all-to-all of even volumes, and the link that bounds it."""
        sent_in_host = volume * (even.ranks_per_host - 1)
        intra_ms, inter_ms = self._in_host_ms("alltoall", sent_in_host, even), 0.0
        if even.world_size > even.ranks_per_host:
            sent_bytes = volume * (even.world_size - even.ranks_per_host)
            inter_ms = self._adapter_ms(sent_bytes, even)
        if inter_ms > intra_ms or even.ranks_per_host == 1:
            return inter_ms, "inter"
        return intra_ms, "intra"

    def ring_ms(self, collective: str, volume: float, even: EvenVolumes) -> float:
        """Return the time of a reduce-scatter or all-gather over all ranks.

        Args:
            volume: bytes that a rank exchanges with every other one.
        """
        per_host, peers = even.ranks_per_host, even.world_size - 1
        if even.world_size == per_host:
            return self._in_host_ms(collective, volume * peers, even)
        # a ring passes on as many bytes as one rank has for all others
        sent_bytes = volume * peers
        intra_ms = self._in_host_ms(collective, sent_bytes, even)
        return max(intra_ms, self._adapter_ms(sent_bytes / per_host, even))

    def at(self, even: EvenVolumes) -> CommunicationModel:
        """Return lines that meet the curves at even volumes."""
        exchange = np.zeros((len(EXCHANGES), len(EXCHANGE_TERMS)))
        reduce = np.zeros((len(EXCHANGES), len(REDUCE_TERMS)))
        if even.world_size == 1:
            return CommunicationModel(exchange, reduce, sequences=self.sequences)
        peers = {"intra": even.ranks_per_host - 1, "inter": even.world_size - even.ranks_per_host}
        for i, kind in enumerate(EXCHANGES):
            volume = even.id_volume if kind == INPUT_DIST else even.volume
            link = self.all_to_all_ms(volume, even)[1]
            fixed_ms, ms_per_mb = _line(lambda v: self.all_to_all_ms(v, even)[0], volume)
            exchange[i, EXCHANGE_TERMS.index("one")] = fixed_ms
            # all ranks wait for the one that sends or gets the most
            exchange[i, EXCHANGE_TERMS.index(f"max_busier_{link}")] = ms_per_mb / peers[link]
            reduce[i] = self._reduce_weights(kind, volume, even, peers)
        all_reduce = np.sum(
            [
                self._reduce_weights(half, REPLICA_BYTES / even.world_size, even, peers)
                for half in RING
            ],
            axis=0,
        )
        lines = CommunicationModel(exchange, reduce, all_reduce, self.sequences)
        return lines.scaled(self.factors)

    def scaled(self, factors: Mapping[str, Floats]) -> ExchangeCurves:
        """Return curves whose `factors` are multiplied by the given ones."""
        both = {kind: self.factors[kind] * factors[kind] for kind in EXCHANGES}
        return dataclasses.replace(self, factors=both)

    def _reduce_weights(
        self, kind: str, volume: float, even: EvenVolumes, peers: dict[str, int]
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the weights of `REDUCE_TERMS`: lines for groups of a host and for all ranks.

        The groups of a host have the terms of its links alone; what all ranks take in addition is
        the weight of the terms of links between hosts.
        """
        weights = dict.fromkeys(REDUCE_TERMS, 0.0)

        def over_all_ms(v: float) -> float:
            if kind in RING:
                return self.ring_ms(RING[kind], v, even)
            return self.all_to_all_ms(v, even)[0]

        if peers["intra"]:
            collective = RING.get(kind, "alltoall")
            fixed_ms, ms_per_mb = _line(
                lambda v: self._in_host_ms(collective, v * peers["intra"], even), volume
            )
            weights["one"], weights["intra"] = fixed_ms, ms_per_mb / peers["intra"]
        if peers["inter"]:
            fixed_ms, ms_per_mb = _line(over_all_ms, volume)
            more_ms = max(fixed_ms - weights["one"], 0.0)
            weights["peers_inter"] = more_ms * 1e3 / peers["inter"]
            more_ms_per_mb = max(ms_per_mb - weights["intra"] * peers["intra"], 0.0)
            weights["inter"] = more_ms_per_mb / peers["inter"]
        return np.array(list(weights.values()))

    def _in_host_ms(self, collective: str, sent_bytes: float, even: EvenVolumes) -> float:
        """Return the time of a collective among the ranks of each host."""
        return self.host.time_ms(
            collective, even.ranks_per_host, sent_bytes, link_gb_per_s=even.intra_gb_per_s
        )

    def _adapter_ms(self, sent_bytes: float, even: EvenVolumes) -> float:
        """Return the time of bytes that every rank sends to other hosts."""
        gb_per_s = even.inter_gb_per_s or self.host.spec.adapter_gb_per_s
        num_hosts = even.world_size // even.ranks_per_host
        # the launch and the first hop cost what they cost in a host of two GPUs
        latency_ms = self.host.time_ms("alltoall", 2, 0.0)
        latency_ms += HOST_DOUBLING_MS * math.log2(num_hosts)
        return latency_ms + sent_bytes / (ADAPTER_SHARE * gb_per_s * 1e6)


Exchanges = CommunicationModel | ExchangeCurves
"""Times of exchanges; `at` gives those that hold for a task."""


def _line(time_ms: Callable[[float], float], volume: float) -> tuple[float, float]:
    """Return a fixed time in ms, and ms per MB of volume, both at least 0; exact at `volume`."""
    low, high = volume / SLOPE_FACTOR, volume * SLOPE_FACTOR
    at_volume_ms = time_ms(volume)
    slope = max((time_ms(high) - time_ms(low)) / (high - low), 0.0)
    # measured times may jump; a line must not be negative at zero
    slope = min(slope, at_volume_ms / volume)
    return at_volume_ms - slope * volume, slope * 1e6
