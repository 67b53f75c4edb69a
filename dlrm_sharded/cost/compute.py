"""What a rank's lookups take, forward and backward, from what its shards ask.

The time of a rank is a sum over its shards of work terms (`WORK_TERMS`) times prices. A shard's
prices depend on its access profile alone, through a small net with positive outputs; the work terms
grow with columns and ids. Prices rise with the weights that one step of the whole rank reads, as
these leave the caches. So a time is zero for a rank without shards, is never negative, grows with
every added shard and column, and with ids of the same profile; adding a shard to a rank adds a
vector to a sum. Beyond the fitted range it goes on linearly in all of these.

This replaces NeuroShard's computation model (arXiv:2305.01868, sec. 3.2), which has none of these
properties and is off by 30 to 54 % on single tables; `neuroshard_paper.py` has that one.

Letters: N ranks, S shards, K work terms, C numbers of a profile, J cache levels, V = 2 (1 + J) + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.features import Floats, Workload

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class PriceNet:
    """One direction's prices.

    Args:
        weights, biases: of layers [C, h], [h, K] with tanh between them; exp at the end.
        cache_gain: [K, J], not negative: by how much prices rise as a cache overflows.
        cache_mb, cache_slope: [J], where that happens, as log10 of MB, and how fast.
        launch_ms, next_launch_ms: what a rank's first lookup takes whatever it looks up, and what
            each further one does.
    """

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]
    cache_gain: Floats
    cache_mb: Floats
    cache_slope: Floats
    launch_ms: float
    next_launch_ms: float

    def priced(self, work: Floats, profile: Floats) -> Floats:
        """[S, 1 + J], ms of the work [S, K], and how much more with each cache overflown.

        Args:
            profile: [S, C], scaled.
        """
        hidden = profile
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = np.tanh(hidden @ weight + bias)
        times = work * np.exp(hidden @ self.weights[-1] + self.biases[-1])
        return np.column_stack([times.sum(axis=1), times @ self.cache_gain])

    def work_ms(self, priced: Floats, read_mb: Floats) -> Floats:
        """[N], of sums of priced work [N, 1 + J], on ranks that read so many MB [N] in a step."""
        level = (np.log10(read_mb + 1e-3)[:, None] - self.cache_mb) * self.cache_slope
        overflow = 0.5 * (1.0 + np.tanh(0.5 * level))
        times: Floats = priced[:, 0] + (overflow * priced[:, 1:]).sum(axis=1)
        return times

    def times_ms(self, priced: Floats, read_mb: Floats, num_lookups: Floats) -> Floats:
        """[N], of sums of priced work [N, 1 + J], of MB read [N] and of lookups launched [N]."""
        times = self.work_ms(priced, read_mb)
        times += self.launch_ms * np.minimum(num_lookups, 1.0)
        times += self.next_launch_ms * np.maximum(num_lookups - 1.0, 0.0)
        return times


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """Forward and backward computation of a rank.

    Args:
        profile_mean, profile_std: [C], to scale profiles.
        profile_low, profile_high: [C], fitted range; beyond it, prices are those at its edge.
    """

    profile_mean: Floats
    profile_std: Floats
    profile_low: Floats
    profile_high: Floats
    forward: PriceNet
    backward: PriceNet

    def vectors(self, workload: Workload) -> Floats:
        """[S, V], what each shard adds to its rank: priced work of both directions, MB read."""
        profile = np.clip(workload.profile(), self.profile_low, self.profile_high)
        scaled = (profile - self.profile_mean) / self.profile_std
        work = workload.work()
        priced = [net.priced(work, scaled) for net in (self.forward, self.backward)]
        return np.column_stack([*priced, workload.unique_bytes() / 1e6])

    def times_ms(self, sums: Floats, num_lookups: Floats) -> Floats:
        """[N, 2], forward and backward.

        Args:
            sums: [N, V], of the vectors of each rank's shards.
            num_lookups: [N], fused modules with any shard: 0 for a rank without.
        """
        return np.column_stack(
            [
                net.times_ms(priced, sums[:, -1], num_lookups)
                for net, priced in self._directions(sums)
            ]
        )

    def work_ms(self, vectors: Floats, read_mb: Floats) -> Floats:
        """[N, 2], what shards of vectors [N, V] add to ranks that read so many MB [N] with them.

        It grows with what the rank reads; a rank's time is the sum over its shards, and launches.
        """
        return np.column_stack(
            [net.work_ms(priced, read_mb) for net, priced in self._directions(vectors)]
        )

    def launch_ms(self, num_lookups: Floats) -> Floats:
        """[N, 2], what launching the lookups takes, whatever they look up."""
        nothing = np.zeros((len(num_lookups), 2 * self.forward.cache_gain.shape[1] + 3))
        return self.times_ms(nothing, num_lookups)

    def _directions(self, vectors: Floats) -> list[tuple[PriceNet, Floats]]:
        """Both nets, with their parts [N, 1 + J] of vectors [N, V]."""
        half = (vectors.shape[1] - 1) // 2
        return [(self.forward, vectors[:, :half]), (self.backward, vectors[:, half:-1])]
