"""Measured times of plans, and the parts of predicted times that are fitted to them.

Letters: N measured times, S shards, W ranks, P parts, K slopes, C numbers of a profile.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.calibration.disturbance import reliability
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.communication import EXCHANGES, STEP_EXCHANGES, CommunicationModel
from dlrm_sharded.cost.compute import LOOKUP_STAGES, ComputeModel
from dlrm_sharded.cost.exchange_curves import EvenVolumes
from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Floats, Workload
from dlrm_sharded.plans.plan_cost import INPUT_DIST, STAGES

OF_SEQUENCES = np.array([[1.0, 0.0], [1.0, 1.0]])
"""[2, C], profiles of what whole sequences, and their row blocks, add to an exchange."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Measured times [N] of one plan, and the parts of what is predicted for them.

    Args:
        parts: [S, P], parts of shards; for exchanges, of a rank's bags and what sequences add.
        time: [S], index of the time to which a row of `parts` adds; ascending, and each occurs.
        profile: [S, C], scaled, the last number is 1 for sequences; for exchanges `OF_SEQUENCES`.
        num_terms: number K of the first parts, each of which has a slope; None for exchanges, whose
            parts share one slope, so that K is 1.
        times_ms: [N], which may be 0.
        reliability: weight of the times of this plan, see `disturbance`.
    """

    parts: Floats
    time: NDArray[np.int64]
    profile: Floats
    times_ms: Floats
    num_terms: int | None = None
    reliability: float = 1.0

    @property
    def no_slopes(self) -> Floats:
        """Slopes [K, C] with which factors depend on no profile."""
        num_slopes = 1 if self.num_terms is None else self.num_terms
        return np.zeros((num_slopes, self.profile.shape[1]))

    def multiplied(self, factors: Floats, slopes: Floats) -> Floats:
        """Return [S, P], the parts times factors [P] with slopes [K, C]."""
        found: Floats = self.parts * factors
        found[:, : self.num_terms] *= np.exp(self.profile @ slopes.T)
        return found

    def sloped(self, parts: Floats) -> Floats:
        """Return [S, K], the parts to which each slope applies."""
        if self.num_terms is None:
            return parts.sum(axis=1, keepdims=True)
        return parts[:, : self.num_terms]

    def log_ratios(self, factors: Floats, slopes: Floats, *, least_ms: float = 0.0) -> Floats:
        """Return [N], the logarithms of measured times over the sums of multiplied parts."""
        sums = sums_by_time(self.multiplied(factors, slopes), self.time).sum(axis=1)
        logs: Floats = np.log(np.maximum(self.times_ms, least_ms)) - np.log(sums)
        return logs

    def where(self, is_kept: NDArray[np.bool_]) -> Observed:
        """Return only the times where `is_kept` [N] is true, with their parts."""
        rows = is_kept[self.time]
        place = np.cumsum(is_kept) - 1
        return dataclasses.replace(
            self,
            parts=self.parts[rows],
            time=place[self.time[rows]],
            profile=self.profile[rows],
            times_ms=self.times_ms[is_kept],
        )


def observed_times(prior: LearnedCostModel, sample: Sample) -> dict[str, Observed]:
    """Return parts and times of the ranks that take part, by direction and exchange."""
    workload, hosts, cost = workload_of_sample(sample), sample.hosts, sample.cost
    times_ms = {
        stage: np.array([rank.stage_ms(stage) for rank in cost.per_rank]) for stage in STAGES
    } | {INPUT_DIST: np.array(cost.input_dist_ms)}
    of_shards, of_launches = prior.compute.parts_ms(workload)
    communication = prior.communication_at(EvenVolumes.of_workload(workload, hosts))
    found = {
        direction: _of_lookups(
            (of_shards[i], of_launches[i]), workload, prior.compute, times_ms[stage]
        )
        for i, (direction, stage) in enumerate(LOOKUP_STAGES.items())
    }
    for kind in EXCHANGES:
        found[kind] = _of_exchange(communication, kind, workload, hosts, times_ms[kind])
    weight = reliability(sample.noise)
    return {name: dataclasses.replace(of, reliability=weight) for name, of in found.items()}


def _of_exchange(
    communication: CommunicationModel, kind: str, workload: Workload, hosts: Hosts, times_ms: Floats
) -> Observed:
    """Return the times [W] of an exchange: rows for bags, sequences, and their row blocks."""
    exchanges = [communication.exchange_of(kind, workload)]
    if kind in STEP_EXCHANGES and workload.is_sequence.any():
        whole, _ = communication.sequences[STEP_EXCHANGES.index(kind)]
        some = [workload.exchange(for_ids=False, sequences=of) for of in ((0, 0), (whole, 0))]
        exchanges = [*some, *exchanges]
    parts = np.array([communication.parts_ms(kind, exchange, hosts) for exchange in exchanges])
    parts[1:] -= parts[:-1].copy()  # more bytes never take less time
    num_rows, num_ranks = parts.shape[:2]
    profiles = np.vstack([np.zeros(len(OF_SEQUENCES)), OF_SEQUENCES])[:num_rows]
    every = Observed(
        parts=parts.swapaxes(0, 1).reshape(num_rows * num_ranks, -1),
        time=np.repeat(np.arange(num_ranks), num_rows),
        profile=np.tile(profiles, (num_ranks, 1)),
        times_ms=times_ms,
    )
    return every.where(sums_by_time(every.parts, every.time).sum(axis=1) > 0)


def _of_lookups(
    parts: tuple[Floats, Floats], workload: Workload, compute: ComputeModel, times_ms: Floats
) -> Observed:
    """Return the lookups of ranks with shards: a row for each shard, and one for launches.

    Args:
        parts: of shards [S, P], and launches of ranks [W, P].
        times_ms: [W].
    """
    of_shards, of_launches = parts
    profile = compute.scaled_profile(workload)
    rank = np.concatenate([workload.rank, np.arange(len(of_launches))])
    order = np.argsort(rank, kind="stable")
    every = Observed(
        parts=np.concatenate([of_shards, of_launches])[order],
        time=rank[order],
        profile=np.concatenate([profile, np.zeros((len(of_launches), profile.shape[1]))])[order],
        times_ms=times_ms,
        num_terms=len(compute.device.terms),
    )
    return every.where(np.bincount(workload.rank, minlength=len(of_launches)) > 0)


def sums_by_time(values: Floats, time: NDArray[np.int64]) -> Floats:
    """Return [N, ...], sums of the rows [S, ...] of each time; see `Observed.time`."""
    if not len(time):
        return values
    first = np.flatnonzero(np.diff(time, prepend=-1))
    sums: Floats = np.add.reduceat(values, first, axis=0)
    return sums
