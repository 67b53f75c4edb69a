"""Computation of a rank: the forward and backward times of its lookups.

The time of a rank is a sum over its shards of work terms (`DeviceWork.terms`) times unit costs. A
shard's unit costs depend on its access profile, through a small net with positive outputs, and rise
with the bytes of weights that its rank reads in a step, because these overflow the caches. Its work
terms grow with columns and ids. So a time is zero for a rank without shards, is never negative,
and grows with every added shard and column and with ids of the same profile. Outside the fitted
range it continues linearly.

For given MB read, all of this is linear. Each shard therefore becomes a vector, and the time of a
rank is a formula of the sum of its shards' vectors. The search relies on that. On GPUs, the time
also depends on the rank's widest shard, see `widest.py`; that is a formula of the sum, too.

This replaces NeuroShard's computation model (arXiv:2305.01868, sec. 3.2), which has none of these
properties and is off by 30 to 54 % on single tables; `published_nets.py` has that one.

Letters: N ranks, S shards, K work terms, C numbers of a profile, J cache levels, A numbers of a
shard by which it crowds others, Q parts of the time that this takes, V = 2 (1 + J) + A + 1, P = K +
2 + Q + 1 parts of a time: of work terms, of the first launch and the next ones, of crowding, and of
dense gradients.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.features import CPU_WORK, DeviceWork, profile_of, work_of
from dlrm_sharded.cost.sequences import SequenceCosts
from dlrm_sharded.cost.widest import WidestShard
from dlrm_sharded.cost.workload import Floats, Workload
from dlrm_sharded.plans.plan_cost import BWD_COMPUTE, DIRECTIONS, FWD_COMPUTE

LOOKUP_STAGES = dict(zip(DIRECTIONS, (FWD_COMPUTE, BWD_COMPUTE), strict=True))
"""The stage that the unit costs of each direction describe: looking up tables or updating them."""

CPU_HALF = (0.8, 3.0)
"""Times of lookups in fp16 relative to fp32 on a CPU, forward and backward. FBGEMM's update of such
rows is slow there (docs/guide/planning.md, "lookups on a CPU")."""

READ_MB = -1
"""Column of a shard's vector with the MB of weights that a step reads. The other columns are the
costs of work in both directions, and the `columns` of its crowding."""


@dataclass(frozen=True, slots=True)
class CostNet:
    """Unit costs of one direction.

    Args:
        weights, biases: layers [C, h], [h, K] with tanh between them and exp at the end.
        cache_gain: [K, J], not negative; by how much a term's cost rises as a cache overflows.
        cache_mb, cache_slope: [J], log10 of the MB at which a cache's `overflow` is 1/2, and how
            steeply the overflow rises there.
        launch_ms, next_launch_ms: time of a rank's first lookup, without its work, and of each
            further one.
        slopes: [C + 1, K], by how much the logarithm of a term's cost rises with the scaled
            profile, in addition to the layers, and for a sequence (older models lack that row),
            see `calibration.factor_fit`; None for zeros.
    """

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]
    cache_gain: Floats
    cache_mb: Floats
    cache_slope: Floats
    launch_ms: float
    next_launch_ms: float
    slopes: Floats | None = None

    def scaled(self, terms: Floats, launches: Floats) -> CostNet:
        """Return the net with the times of terms [K] and of launches [2] multiplied by factors."""
        first, following = launches.tolist()
        return dataclasses.replace(
            self,
            biases=(*self.biases[:-1], self.biases[-1] + np.log(terms)),
            launch_ms=self.launch_ms * first,
            next_launch_ms=self.next_launch_ms * following,
        )

    def sloped(self, slopes: Floats) -> CostNet:
        """Return the net with slopes [K, C + 1] of its unit costs added to those that it has."""
        summed = slopes.T.copy()
        if self.slopes is not None:
            summed[: len(self.slopes)] += self.slopes
        return dataclasses.replace(self, slopes=summed)

    def work_costs(self, work: Floats, profile: Floats) -> Floats:
        """Return [S, 1 + J], ms of the work [S, K] in cache, and ms that each full overflow adds.

        Args:
            profile: [S, C + 1], see `ComputeModel.scaled_profile`.
        """
        times = self.times_in_cache_ms(work, profile)
        return np.column_stack([times.sum(axis=1), times @ self.cache_gain])

    def times_in_cache_ms(self, work: Floats, profile: Floats) -> Floats:
        """Return [S, K], ms of the work [S, K] of each term in cache; see `work_costs`."""
        hidden = profile[:, : len(self.weights[0])]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = np.tanh(hidden @ weight + bias)
        logs = hidden @ self.weights[-1] + self.biases[-1]
        if self.slopes is not None:
            logs = logs + profile[:, : len(self.slopes)] @ self.slopes
        # exp keeps every unit cost positive, so more work never takes less time
        return work * np.exp(logs)

    def work_ms(self, work_costs: Floats, read_mb: Floats) -> Floats:
        """Return [N], time of work with costs [N, 1 + J] on ranks that read `read_mb` [N]."""
        return work_costs[:, 0] + (self.overflow(read_mb) * work_costs[:, 1:]).sum(axis=1)

    def overflow(self, read_mb: Floats) -> Floats:
        """Return [N, J], the overflow, 0 to 1, of each cache on ranks that read `read_mb` [N]."""
        # 1e-3 keeps the logarithm finite for a rank that reads nothing
        level = (np.log10(read_mb + 1e-3)[:, None] - self.cache_mb) * self.cache_slope
        # the logistic function as a tanh, which cannot overflow
        return 0.5 * (1.0 + np.tanh(0.5 * level))

    def launches_ms(self, num_lookups: Floats) -> Floats:
        """Return [N, 2], time of the first lookup of ranks and of all further ones."""
        # a rank without shards launches none
        first, following = np.minimum(num_lookups, 1.0), np.maximum(num_lookups - 1.0, 0.0)
        return np.column_stack([first * self.launch_ms, following * self.next_launch_ms])


@dataclass(frozen=True, slots=True)
class DenseCosts:
    """Costs of the dense gradients of replicas, in addition to the work of a fused lookup.

    Gradients are cleared, gathered, divided by the number of ranks, and applied to all weights.

    Args:
        replica_ms: time in the backward pass for each replica on a rank.
        mb_ms: time for each MB of its weights.
    """

    replica_ms: float = 0.0
    mb_ms: float = 0.0

    def times_ms(self, workload: Workload) -> Floats:
        """Return [S], times in the backward pass; zeros for shards that are not replicas."""
        mb = workload.replica_bytes() / 1e6
        return workload.is_replica * self.replica_ms + mb * self.mb_ms


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """Forward and backward computation of a rank.

    Args:
        profile_mean, profile_std: [C], to scale profiles.
        profile_low, profile_high: [C], fitted range; outside it, unit costs are those at its edge.
        device: the work to which the unit costs apply.
        dense: costs of the dense gradients of replicas.
        crowding: additional time of shards because of others on their rank, apart from what these
            read: on GPUs because of wide shards, on CPUs because of sequences.
    """

    profile_mean: Floats
    profile_std: Floats
    profile_low: Floats
    profile_high: Floats
    forward: CostNet
    backward: CostNet
    device: DeviceWork = CPU_WORK
    dense: DenseCosts = DenseCosts()
    crowding: WidestShard | SequenceCosts = dataclasses.field(default_factory=SequenceCosts)

    @property
    def num_parts(self) -> int:
        """Number of parts of a time: P."""
        return len(self.device.terms) + 2 + self.crowding.num_parts + 1

    def scaled(self, forward: Floats | float, backward: Floats | float) -> ComputeModel:
        """Return the model with the parts of each direction [P] multiplied by factors."""
        factors = np.array([np.broadcast_to(f, self.num_parts) for f in (forward, backward)])
        terms, launches, crowding, dense = np.split(
            factors, np.cumsum([len(self.device.terms), 2, self.crowding.num_parts]), axis=1
        )
        replica_ms, mb_ms = float(dense[1, 0]) * np.array(dataclasses.astuple(self.dense))
        return dataclasses.replace(
            self,
            forward=self.forward.scaled(terms[0], launches[0]),
            backward=self.backward.scaled(terms[1], launches[1]),
            crowding=self.crowding.scaled(crowding),
            dense=DenseCosts(float(replica_ms), float(mb_ms)),
        )

    def sloped(self, forward: Floats, backward: Floats) -> ComputeModel:
        """Return the model with slopes [K, C + 1] of the unit costs of each direction's terms."""
        return dataclasses.replace(
            self, forward=self.forward.sloped(forward), backward=self.backward.sloped(backward)
        )

    def parts_ms(self, workload: Workload) -> tuple[Floats, Floats]:
        """Return the parts of both directions' times, which sum to `times_ms` over a rank.

        Returns:
            The parts of shards [2, S, P], and of the launches of ranks [2, W, P].
        """
        work, profile = work_of(workload, self.device), self.scaled_profile(workload)
        read_mb = workload.by_rank(workload.unique_bytes() / 1e6)[workload.rank]
        columns, num_lookups = self.crowding.columns(workload), workload.num_lookups()
        num_terms = work.shape[1]
        of_shards = np.zeros((2, len(work), self.num_parts))
        of_launches = np.zeros((2, len(num_lookups), self.num_parts))
        for i, (net, half) in enumerate(zip(self.nets, self._half_factors(workload), strict=True)):
            in_cache = net.times_in_cache_ms(work, profile) * half
            of_shards[i, :, :num_terms] = in_cache * (
                1.0 + net.overflow(read_mb) @ net.cache_gain.T
            )
            of_launches[i, :, num_terms : num_terms + 2] = net.launches_ms(num_lookups)
        crowd = workload.by_rank(columns)[workload.rank]
        of_shards[:, :, num_terms + 2 : -1] = self.crowding.parts_ms(columns, crowd)
        of_shards[1, :, -1] = self.dense.times_ms(workload)
        return of_shards, of_launches

    def vectors(self, workload: Workload) -> Floats:
        """Return [S, V], what each shard adds to its rank: costs of work, and MB (`READ_MB`)."""
        scaled, work = self.scaled_profile(workload), work_of(workload, self.device)
        work_costs = [
            net.work_costs(work, scaled) * half
            for net, half in zip(self.nets, self._half_factors(workload), strict=True)
        ]
        # gradients of replicas stream through memory, not caches
        work_costs[1][:, 0] += self.dense.times_ms(workload)
        columns = self.crowding.columns(workload)
        return np.column_stack([*work_costs, columns, workload.unique_bytes() / 1e6])

    def times_ms(self, sums: Floats, num_lookups: Floats) -> Floats:
        """Return [N, 2], time of forward and backward computation.

        Args:
            sums: [N, V], sums of the vectors of each rank's shards.
            num_lookups: [N], fused modules with any shard on the rank: 0 for a rank without.
        """
        return self.work_ms(sums, sums) + self.launch_ms(num_lookups)

    def work_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return [N, 2], the times that shards of vectors [N, V] add to ranks.

        They never fall when shards are added to the rank. A rank's time is the sum over its shards,
        plus launches.

        Args:
            crowd: [N, V], sums of the vectors of all shards of the rank.
        """
        work_costs = np.split(vectors[:, : self._num_work_costs], 2, axis=1)
        times: Floats = np.column_stack(
            [
                net.work_ms(costs, crowd[:, READ_MB])
                for net, costs in zip(self.nets, work_costs, strict=True)
            ]
        )
        columns = slice(self._num_work_costs, READ_MB)
        return times + self.crowding.parts_ms(vectors[:, columns], crowd[:, columns]).sum(axis=2).T

    def stand_alone_ms(self, vectors: Floats) -> Floats:
        """Return [N], time in both directions of shards of vectors [N, V], each alone on a rank."""
        return self.work_ms(vectors, vectors).sum(axis=1)

    def crowding_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return [..., 2], by how much shards and a crowd are slower on one rank than apart.

        The effect of what a rank reads is not included.

        Args:
            vectors, crowd: [..., V], sums over shards; they are broadcast.
        """
        assert isinstance(self.crowding, WidestShard), "nobody asks where only sequences crowd"
        columns = slice(self._num_work_costs, READ_MB)
        return self.crowding.added_ms(vectors[..., columns], crowd[..., columns])

    def launch_ms(self, num_lookups: Floats) -> Floats:
        """Return [N, 2], time to launch the lookups, without their work."""
        return np.column_stack([net.launches_ms(num_lookups).sum(axis=1) for net in self.nets])

    @property
    def nets(self) -> tuple[CostNet, CostNet]:
        """The unit costs of both directions."""
        return self.forward, self.backward

    def scaled_profile(self, workload: Workload) -> Floats:
        """Return [S, C + 1], inputs of the nets, and 1 for a sequence, which only slopes use."""
        # A net is not valid for profiles that it was not fitted to.
        profile = np.clip(profile_of(workload), self.profile_low, self.profile_high)
        scaled = (profile - self.profile_mean) / self.profile_std
        return np.column_stack([scaled, workload.is_sequence])

    def _half_factors(self, workload: Workload) -> list[Floats]:
        """Return [S, 1] for each direction, factors for fp16 on a CPU; ones for all others."""
        factors = (1.0, 1.0) if self.device.has_warps else CPU_HALF
        return [np.where(workload.is_half[:, None], factor, 1.0) for factor in factors]

    @property
    def _num_work_costs(self) -> int:
        """Number of entries of a vector that are costs of work in both directions: 2 (1 + J)."""
        return 2 * (1 + self.forward.cache_gain.shape[1])
