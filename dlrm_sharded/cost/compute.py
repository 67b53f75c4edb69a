"""Computation of a rank: the forward and backward times of its lookups.

The time of a rank is a sum over its shards of work terms (`DeviceWork.terms`) times prices. A
shard's prices depend on its access profile alone, through a small net with positive outputs, and
its work terms grow with columns and ids. Prices rise with the weights that a step of the whole rank
reads, as these leave the caches. So a time is zero for a rank without shards, is never negative,
and grows with every added shard and column and with ids of the same profile. Outside the fitted
range it continues linearly.

For given MB read, all of this is linear. Each shard therefore becomes a vector, and the time of a
rank is a formula of the sum of its shards' vectors. The search relies on that. On GPUs, the time
also depends on the rank's widest shard, see `widest.py`; that is a formula of the sum, too.

This replaces NeuroShard's computation model (arXiv:2305.01868, sec. 3.2), which has none of these
properties and is off by 30 to 54 % on single tables; `neuroshard.py` has that one.

Letters: N ranks, S shards, K work terms, C numbers of a profile, J cache levels, Q terms of the
widest shard, A numbers of a shard that these or `sequences` need, V = 2 (1 + J) + A + 1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.features import CPU_WORK, DeviceWork, profile_of, work_of
from dlrm_sharded.cost.sequences import SequencePrices, sequence_rows
from dlrm_sharded.cost.widest import NUM_COLUMNS, crowding_terms, widest_terms, width_vectors
from dlrm_sharded.cost.workload import Floats, Workload
from dlrm_sharded.plans.plan_cost import BWD_COMPUTE, DIRECTIONS, FWD_COMPUTE

LOOKUP_STAGES = dict(zip(DIRECTIONS, (FWD_COMPUTE, BWD_COMPUTE), strict=True))
"""The stage that the prices of each direction are of: looking tables up, and updating them."""

CPU_HALF = (0.8, 3.0)
"""Times of lookups in fp16 relative to fp32 on a CPU, forward and backward. FBGEMM's update of such
rows is slow there (docs/reference/precision.md, "lookups on a CPU")."""

READ_MB = -1
"""Column of a shard's vector with the MB of weights that a step reads. The other columns are the
priced work of both directions, and on GPUs `widest.width_vectors`, on CPUs `sequence_rows`."""


@dataclass(frozen=True, slots=True)
class PriceNet:
    """Prices of one direction.

    `calibration.fit.TrainablePriceNet` is the same net in torch; a test compares the two.

    Args:
        weights, biases: layers [C, h], [h, K] with tanh between them and exp at the end.
        cache_gain: [K, J], not negative; by how much a term's price rises as a cache overflows.
        cache_mb, cache_slope: [J], log10 of the MB at which a cache is half overflown, and how
            fast it overflows around them.
        launch_ms, next_launch_ms: time of a rank's first lookup, without its work, and of each
            further one.
        slopes: [C + 1, K], by how much the logarithm of a term's price rises with the scaled
            profile beside what the layers say, and for a sequence (older models lack that row), see
            `calibration.factor_fit`; None for not at all.
    """

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]
    cache_gain: Floats
    cache_mb: Floats
    cache_slope: Floats
    launch_ms: float
    next_launch_ms: float
    slopes: Floats | None = None

    def scaled(self, terms: Floats, launches: Floats) -> PriceNet:
        """Return the net with the times of terms [K] and of launches [2] multiplied by factors."""
        first, following = launches.tolist()
        return dataclasses.replace(
            self,
            biases=(*self.biases[:-1], self.biases[-1] + np.log(terms)),
            launch_ms=self.launch_ms * first,
            next_launch_ms=self.next_launch_ms * following,
        )

    def sloped(self, slopes: Floats) -> PriceNet:
        """Return the net whose prices rise with the profile by slopes [K, C + 1] as well."""
        summed = slopes.T.copy()
        if self.slopes is not None:
            summed[: len(self.slopes)] += self.slopes
        return dataclasses.replace(self, slopes=summed)

    def priced(self, work: Floats, profile: Floats) -> Floats:
        """Return [S, 1 + J], ms of the work [S, K] in cache, and what each overflown cache adds.

        Args:
            profile: [S, C + 1], see `ComputeModel.scaled_profile`.
        """
        times = self.times_in_cache_ms(work, profile)
        return np.column_stack([times.sum(axis=1), times @ self.cache_gain])

    def times_in_cache_ms(self, work: Floats, profile: Floats) -> Floats:
        """Return [S, K], ms of the work [S, K] of each term in cache; see `priced`."""
        hidden = profile[:, : len(self.weights[0])]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = np.tanh(hidden @ weight + bias)
        logs = hidden @ self.weights[-1] + self.biases[-1]
        if self.slopes is not None:
            logs = logs + profile[:, : len(self.slopes)] @ self.slopes
        # exp keeps every price positive, so more work never takes less time
        return work * np.exp(logs)

    def work_ms(self, priced: Floats, read_mb: Floats) -> Floats:
        """Return [N], time of priced work [N, 1 + J] on ranks that read so many MB [N]."""
        return priced[:, 0] + (self.overflow(read_mb) * priced[:, 1:]).sum(axis=1)

    def overflow(self, read_mb: Floats) -> Floats:
        """Return [N, J], the shares to which the caches of ranks that read MB [N] overflow."""
        # a rank that reads nothing has a logarithm, too
        level = (np.log10(read_mb + 1e-3)[:, None] - self.cache_mb) * self.cache_slope
        # the logistic function as a tanh, which cannot overflow
        return 0.5 * (1.0 + np.tanh(0.5 * level))

    def times_ms(self, priced: Floats, read_mb: Floats, num_lookups: Floats) -> Floats:
        """Return [N], time of priced work [N, 1 + J], MB read [N] and lookups launched [N]."""
        times = self.work_ms(priced, read_mb)
        # the first lookup has a price of its own; a rank without shards launches none
        times += self.launch_ms * np.minimum(num_lookups, 1.0)
        times += self.next_launch_ms * np.maximum(num_lookups - 1.0, 0.0)
        return times


@dataclass(frozen=True, slots=True)
class DensePrices:
    """Prices of the dense gradients of replicas, in addition to the work of a fused lookup.

    Gradients are cleared, gathered, divided by the number of ranks, and applied to all weights.

    Args:
        replica_ms: time in the backward pass for each replica on a rank.
        mb_ms: time for each MB of its weights.
    """

    replica_ms: float = 0.0
    mb_ms: float = 0.0

    def scaled(self, factor: float) -> DensePrices:
        """Return the prices multiplied by a factor."""
        return DensePrices(self.replica_ms * factor, self.mb_ms * factor)


def dense_terms(workload: Workload) -> Floats:
    """Return [S, 2], what `DensePrices` are paid for: replicas, and MB of their weights."""
    return np.column_stack([workload.is_replica * 1.0, workload.replica_bytes() / 1e6])


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """Forward and backward computation of a rank.

    Args:
        profile_mean, profile_std: [C], to scale profiles.
        profile_low, profile_high: [C], fitted range; outside it, prices are those at its edge.
        device: the work that was priced.
        widest_ms: [2, Q], prices of `widest.WIDEST_TERMS` for both directions, not negative; None
            on devices without warps.
        dense: prices of the dense gradients of replicas.
        sequences: prices of updates of sequences, beside those of bags; zeros on GPUs.
    """

    profile_mean: Floats
    profile_std: Floats
    profile_low: Floats
    profile_high: Floats
    forward: PriceNet
    backward: PriceNet
    device: DeviceWork = CPU_WORK
    widest_ms: Floats | None = None
    dense: DensePrices = DensePrices()
    sequences: SequencePrices = dataclasses.field(default_factory=SequencePrices)

    def __post_init__(self) -> None:
        assert self.device.has_warps == (self.widest_ms is not None)

    @property
    def num_parts(self) -> int:
        """Number of parts of a time.

        They are K terms, 2 kinds of launches, Q terms, sequences, and dense gradients.
        """
        num_widest = 0 if self.widest_ms is None else self.widest_ms.shape[1]
        return len(self.device.terms) + 2 + num_widest + 2

    def scaled(self, forward: Floats | float, backward: Floats | float) -> ComputeModel:
        """Return the model with the parts of each direction [num_parts] multiplied by factors."""
        num_terms = len(self.device.terms)
        factors = np.array([np.broadcast_to(f, self.num_parts) for f in (forward, backward)])
        nets = [
            net.scaled(of_net[:num_terms], of_net[num_terms : num_terms + 2])
            for net, of_net in zip((self.forward, self.backward), factors, strict=True)
        ]
        widest_ms = self.widest_ms
        if widest_ms is not None:
            widest_ms = widest_ms * factors[:, num_terms + 2 : -2]
        return dataclasses.replace(
            self,
            forward=nets[0],
            backward=nets[1],
            widest_ms=widest_ms,
            dense=self.dense.scaled(float(factors[-1, -1])),
            sequences=self.sequences.scaled(float(factors[-1, -2])),
        )

    def sloped(self, forward: Floats, backward: Floats) -> ComputeModel:
        """Return the model with slopes [K, C + 1] of the prices of each direction's terms."""
        return dataclasses.replace(
            self, forward=self.forward.sloped(forward), backward=self.backward.sloped(backward)
        )

    def parts_ms(self, workload: Workload) -> Floats:
        """Return [2, W, num_parts], parts of both directions' times; they sum to `times_ms`."""
        pairs = self.shard_parts_ms(workload)
        return np.stack([workload.by_rank(of_shards) + launches for of_shards, launches in pairs])

    def shard_parts_ms(self, workload: Workload) -> list[tuple[Floats, Floats]]:
        """Return the parts of both directions' times: of shards [S, num_parts] and of the launches
        of ranks [W, num_parts]."""
        read_mb = workload.by_rank(workload.unique_bytes() / 1e6)
        crowd = workload.by_rank(self._crowding_columns(workload))
        of_shards = self.work_parts_ms(workload, read_mb[workload.rank], crowd[workload.rank])
        num_lookups, num_terms = workload.num_lookups(), len(self.device.terms)
        launches = np.stack([np.minimum(num_lookups, 1.0), np.maximum(num_lookups - 1.0, 0.0)], 1)
        pairs = []
        for of_direction, net in zip(of_shards, (self.forward, self.backward), strict=True):
            of_launches = np.zeros((len(num_lookups), self.num_parts))
            of_launches[:, num_terms : num_terms + 2] = launches * [
                net.launch_ms,
                net.next_launch_ms,
            ]
            pairs.append((of_direction, of_launches))
        return pairs

    def work_parts_ms(
        self, workload: Workload, read_mb: Floats, crowd: Floats | None = None
    ) -> Floats:
        """Return [2, S, num_parts], parts of the times that shards add to ranks, without launches.

        Args:
            read_mb: [S], MB of weights that the rank of each shard reads.
            crowd: [S, A], sums over the ranks of what crowds shards; None for shards that are the
                widest on theirs, and the only ones of sequences.
        """
        work, profile = work_of(workload, self.device), self.scaled_profile(workload)
        of_shards = self._crowding_columns(workload)
        crowd = of_shards if crowd is None else crowd
        parts = np.zeros((2, len(work), self.num_parts))
        parts[1, :, -1] = self._dense_ms(workload)
        if self.widest_ms is None:
            far_ms = self.sequences.far_ms(of_shards[:, 0], crowd[:, 0])
            parts[1, :, -2] = self.sequences.near_ms(workload) + far_ms
        for i, net in enumerate((self.forward, self.backward)):
            in_cache = net.times_in_cache_ms(work, profile) * self._half_factors(workload)[i]
            terms = in_cache * (1.0 + net.overflow(read_mb) @ net.cache_gain.T)
            parts[i, :, : work.shape[1]] = terms
            if self.widest_ms is not None:
                widest = widest_terms(of_shards, crowd)
                parts[i, :, work.shape[1] + 2 : -2] = widest * self.widest_ms[i]
        return parts

    def vectors(self, workload: Workload) -> Floats:
        """Return [S, V], each shard's contribution to its rank: priced work, and MB (`READ_MB`)."""
        scaled, work = self.scaled_profile(workload), work_of(workload, self.device)
        factors = self._half_factors(workload)
        priced = [
            net.priced(work, scaled) * factor
            for net, factor in zip((self.forward, self.backward), factors, strict=True)
        ]
        # gradients of replicas stream through memory, not caches
        priced[1][:, 0] += self._dense_ms(workload) + self.sequences.near_ms(workload)
        crowding = self._crowding_columns(workload)
        return np.column_stack([*priced, crowding, workload.unique_bytes() / 1e6])

    def times_ms(self, sums: Floats, num_lookups: Floats) -> Floats:
        """Return [N, 2], time of forward and backward computation.

        Args:
            sums: [N, V], sums of the vectors of each rank's shards.
            num_lookups: [N], fused modules with any shard on the rank: 0 for a rank without.
        """
        times: Floats = np.column_stack(
            [
                net.times_ms(priced, sums[:, READ_MB], num_lookups)
                for net, priced in self._directions(sums)
            ]
        )
        return times + self._crowded_ms(sums, sums)

    def work_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return [N, 2], the times that shards of vectors [N, V] add to ranks.

        They never fall when shards are added to the rank. A rank's time is the sum over its shards,
        plus launches.

        Args:
            crowd: [N, V], sums of the vectors of all shards of the rank.
        """
        times: Floats = np.column_stack(
            [net.work_ms(priced, crowd[:, READ_MB]) for net, priced in self._directions(vectors)]
        )
        return times + self._crowded_ms(vectors, crowd)

    def stand_alone_ms(self, vectors: Floats) -> Floats:
        """Return [N], both directions of shards of vectors [N, V], each on a rank of its own."""
        return self.work_ms(vectors, vectors).sum(axis=1)

    def crowding_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return [..., 2], by how much shards and a crowd are slower on one rank than apart.

        Only the widest shard counts here, not what is read, so it is 0 where `widest_ms` is None.

        Args:
            vectors, crowd: [..., V], sums over shards; they are broadcast.
        """
        if self.widest_ms is None:
            return np.zeros(2)
        columns = self._crowd_columns
        return crowding_terms(vectors[..., columns], crowd[..., columns]) @ self.widest_ms.T

    def launch_ms(self, num_lookups: Floats) -> Floats:
        """Return [N, 2], time to launch the lookups, without their work."""
        # without priced work, the launches are all that remains of a time
        num_priced = 2 * self._num_priced
        num_crowding = 1 if self.widest_ms is None else NUM_COLUMNS
        sums = np.zeros((len(num_lookups), num_priced + num_crowding + 1))
        return self.times_ms(sums, num_lookups)

    def _dense_ms(self, workload: Workload) -> Floats:
        """Return [S], time for the dense gradients of replicas in the backward pass."""
        times: Floats = dense_terms(workload) @ [self.dense.replica_ms, self.dense.mb_ms]
        return times

    def _crowding_columns(self, workload: Workload) -> Floats:
        """Return [S, A], what makes other shards of the rank slower: widths, or rows of maps."""
        if self.widest_ms is None:
            return sequence_rows(workload)[:, None]
        return width_vectors(workload)

    def scaled_profile(self, workload: Workload) -> Floats:
        """Return [S, C + 1], the inputs of the nets, and for slopes alone 1 for a sequence."""
        # A net is not valid for profiles that it was not fitted to.
        profile = np.clip(profile_of(workload), self.profile_low, self.profile_high)
        scaled = (profile - self.profile_mean) / self.profile_std
        return np.column_stack([scaled, workload.is_sequence])

    def _half_factors(self, workload: Workload) -> tuple[Floats | float, Floats | float]:
        """Return factors of both directions, [S, 1] each: other than 1 for fp16 on a CPU."""
        if self.device.has_warps:
            return 1.0, 1.0
        is_half = workload.is_half[:, None]
        forward, backward = CPU_HALF
        return np.where(is_half, forward, 1.0), np.where(is_half, backward, 1.0)

    @property
    def _num_priced(self) -> int:
        """Numbers of a vector that are priced work of one direction: 1 + J."""
        return 1 + self.forward.cache_gain.shape[1]

    def _directions(self, vectors: Floats) -> tuple[tuple[PriceNet, Floats], ...]:
        """Pair each net with its priced work [N, 1 + J] in vectors [N, V]."""
        num_priced = self._num_priced
        return (
            (self.forward, vectors[:, :num_priced]),
            (self.backward, vectors[:, num_priced : 2 * num_priced]),
        )

    @property
    def _crowd_columns(self) -> slice:
        """Columns of a vector with `_crowding_columns`."""
        return slice(2 * self._num_priced, READ_MB)

    def _crowded_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return [N, 2], times of shards [N, V] that others of a crowd [N, V] make longer."""
        of_shards, of_crowd = vectors[:, self._crowd_columns], crowd[:, self._crowd_columns]
        if self.widest_ms is None:
            return self.sequences.far_ms(of_shards, of_crowd) * [0.0, 1.0]
        return widest_terms(of_shards, of_crowd) @ self.widest_ms.T
