"""A sharder that places tables, or pieces of tables that do not fit, by a trained policy."""

from __future__ import annotations

import dataclasses

from dlrm_sharded.errors import ConfigError, InfeasibleTaskError, check_count
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.profiles import with_profiles
from dlrm_sharded.rl.base import Policy
from dlrm_sharded.rl.policy import load_policy
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.heuristics import least_loaded, place_greedily
from dlrm_sharded.sharders.splitting import Splitting, splittings, unsplit
from dlrm_sharded.task import GIB, MEMORY_KEYS, ShardingTask
from dlrm_sharded.validation import why_too_large, why_too_wide


class PolicySharder:
    """Places tables by a trained policy, and splits them ever finer until all of them fit.

    Args:
        num_samples: number of placements to sample besides the most probable one. The one that the
            policy's own cost network rates cheapest is taken.
        split: whether tables may be split, see `splitting.splittings`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        name: str,
        num_samples: int = 16,
        split: bool = True,
        seed: int = 0,
    ) -> None:
        check_count("sharder.num_samples", num_samples, least=0)
        if not isinstance(split, bool):
            raise ConfigError(f"sharder.split is {split!r}, must be true or false")
        check_count("sharder.seed", seed, least=0)
        self._policy = policy
        self.name = name
        self._num_samples = num_samples
        self._split = split
        self._seed = seed

    def shard(self, task: ShardingTask) -> ShardingPlan:
        _check_feasible(task, split=self._split)
        task = with_profiles(task)
        for splitting in splittings(task) if self._split else [unsplit(task)]:
            ranks = self._place(splitting)
            if ranks is not None and (ranks := splitting.spread(ranks)) is not None:
                return ShardingPlan(task.topology.world_size, splitting.shards(ranks))
        raise InfeasibleTaskError(self._not_found(task))

    def _place(self, splitting: Splitting) -> tuple[int, ...] | None:
        """Return the rank of each piece, or None where the policy found no room."""
        pieces, memory_bytes = splitting.pieces, splitting.free_bytes
        if min(memory_bytes) < 0:
            return None
        if not pieces:
            return ()
        # A topology refuses ranks without memory; no piece fits into one byte.
        by_rank = tuple(max(1, free) for free in memory_bytes)
        task = splitting.task
        topology = dataclasses.replace(task.topology, memory_bytes_by_rank=by_rank)
        return self._policy.place(
            ShardingTask(pieces, topology, task.batch_size),
            num_samples=self._num_samples,
            seed=self._seed,
        )

    def _not_found(self, task: ShardingTask) -> str:
        topology, used = task.topology, task.table_bytes
        advice = "use sharder=neuroshard" if self._split else "set sharder.split=true"
        return (
            f"sharder={self.name} found no room for {len(task.tables)} "
            f"{'tables, split ever finer' if self._split else 'whole tables'}, of {used:,} B "
            f"({used / GIB:.2f} GiB) on {topology.world_size} ranks with "
            f"{sum(topology.rank_memory_bytes):,} B in all; this does not prove that no plan fits. "
            f"Add ranks or memory ({MEMORY_KEYS}), or {advice}"
        )


def policy_sharder(
    context: SharderContext,
    *,
    method: str,
    artifact: str | None = None,
    num_samples: int = 16,
    split: bool = True,
    seed: int = 0,
) -> PolicySharder:
    """Build a sharder with the policy that a method trained for some hardware."""
    policy = load_policy(method, artifact, context.run)
    return PolicySharder(policy, name=method, num_samples=num_samples, split=split, seed=seed)


def _check_feasible(task: ShardingTask, *, split: bool) -> None:
    """Raise InfeasibleTaskError if it is certain that the policy finds no plan."""
    topology = task.topology
    if reason := why_too_large(task.table_bytes, topology.rank_memory_bytes):
        raise InfeasibleTaskError(reason)
    if reason := why_too_wide(task, splits=split):
        raise InfeasibleTaskError(reason)
    if not split:
        largest = max(task.tables, key=topology.table_bytes)
        place_greedily(task, [largest], [1.0], least_loaded)  # raises if it fits no rank
