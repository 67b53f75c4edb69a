"""Plans of a trained policy, which places whole tables, or pieces of those that have no room."""

from __future__ import annotations

import dataclasses

from dlrm_sharded.errors import ConfigError, InfeasibleTaskError, check_count
from dlrm_sharded.plan import ShardingPlan
from dlrm_sharded.profiles import with_profiles
from dlrm_sharded.rl.base import Policy
from dlrm_sharded.rl.policy import load_policy
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.heuristics import least_weight, place_greedily
from dlrm_sharded.sharders.splitting import Cut, cuts, whole
from dlrm_sharded.task import GIB, ShardingTask


class PolicySharder:
    """Takes what a policy places, of tables that are cut until it finds room for them.

    Args:
        num_samples: placements drawn, beside the most probable one; that of the least cost which
            the policy predicts is taken.
        split: whether tables may be cut, see `cut.cuts`.
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
        _check_memory(task, split=self._split)
        task = with_profiles(task)
        for cut in cuts(task) if self._split else [whole(task)]:
            ranks = self._place(cut)
            if ranks is not None:
                return ShardingPlan(task.topology.world_size, cut.shards(ranks))
        raise InfeasibleTaskError(self._not_found(task))

    def _place(self, cut: Cut) -> tuple[int, ...] | None:
        """The rank of each piece; None where no room was found."""
        pieces, memory_bytes = cut.pieces, cut.memory_bytes
        if min(memory_bytes) < 0:
            return None
        if not pieces:
            return ()
        # no topology has a rank without memory, and no piece fits one byte
        by_rank = tuple(max(1, each) for each in memory_bytes)
        topology = dataclasses.replace(cut.task.topology, memory_bytes_by_rank=by_rank)
        return self._policy.place(
            ShardingTask(pieces, topology, cut.task.batch_size),
            num_samples=self._num_samples,
            seed=self._seed,
        )

    def _not_found(self, task: ShardingTask) -> str:
        topology, used = task.topology, task.table_bytes
        otherwise = "use sharder=neuroshard" if self._split else "set sharder.split=true"
        return (
            f"sharder={self.name} found no room for {len(task.tables)} "
            f"{'tables, cut ever finer' if self._split else 'whole tables'}, of {used:,} B "
            f"({used / GIB:.2f} GiB) on {topology.world_size} ranks with "
            f"{sum(topology.rank_memory_bytes):,} B in all; that there is no plan is not proven. "
            f"Add ranks, raise topology.memory_gib, or {otherwise}"
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


def _check_memory(task: ShardingTask, *, split: bool) -> None:
    """Raise InfeasibleTaskError where it is proven that there is no plan."""
    topology = task.topology
    used, capacity = task.table_bytes, sum(topology.rank_memory_bytes)
    if used > capacity:
        raise InfeasibleTaskError(
            f"no plan can fit: the tables need {used:,} B ({used / GIB:.2f} GiB), all "
            f"{topology.world_size} ranks together have {capacity:,} B "
            f"({capacity / GIB:.2f} GiB); add ranks or raise topology.memory_gib"
        )
    if not split:
        largest = max(task.tables, key=topology.table_bytes)
        place_greedily(task, [largest], [1.0], least_weight)  # says so where it fits no rank
