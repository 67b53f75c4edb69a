"""A sharder that places tables, or pieces of tables that do not fit, by a trained policy."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass
from typing import Any

from dlrm_sharded.cost.base import CostModel, is_additive, with_assumed_profiles
from dlrm_sharded.files.errors import InfeasibleTaskError, check_count, check_flag
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import GIB, MEMORY_KEYS, ShardingTask
from dlrm_sharded.plans.validation import why_too_large, why_too_wide
from dlrm_sharded.rl.base import Policy
from dlrm_sharded.rl.learned_policy import ALWAYS, AUTO, load_policy
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.heuristics import least_loaded, place_greedily
from dlrm_sharded.sharders.splitting import Splitting, splittings, unsplit


@dataclass(frozen=True, slots=True, eq=False)
class PolicySharder:
    """Places tables by a trained policy, and splits them ever finer until all of them fit.

    The policy's own cost network chooses among its placements, as published.

    Args:
        num_samples: number of placements to sample besides the most probable one.
        split: whether tables may be split, see `splitting.splittings`.
        cost_model: assumes access profiles for tables that have none.
    """

    policy: Policy
    _: KW_ONLY
    name: str
    num_samples: int = 16
    split: bool = True
    seed: int = 0
    cost_model: CostModel | None = None

    def __post_init__(self) -> None:
        check_count("sharder.num_samples", self.num_samples, least=0)
        check_flag("sharder.split", self.split)
        check_count("sharder.seed", self.seed, least=0)

    @property
    def uses_costs(self) -> bool:
        """Return whether the policy reads the costs of the run's cost model."""
        return bool(getattr(self.policy, "reads_costs", False))

    @property
    def costs(self) -> str:
        """Name of the costs that the policy reads."""
        return "this hardware's" if self.uses_costs else "its own"

    def shard(self, task: ShardingTask) -> ShardingPlan:
        _check_feasible(task, split=self.split)
        task = with_assumed_profiles(self.cost_model, task)
        for splitting in splittings(task) if self.split else [unsplit(task)]:
            ranks = self._ranks(splitting)
            if ranks is not None:
                return ShardingPlan(task.topology.world_size, splitting.shards(ranks))
        raise InfeasibleTaskError(self._not_found(task))

    def _ranks(self, splitting: Splitting) -> tuple[int, ...] | None:
        """Return the rank of each piece, or None if the policy does not fit all of them."""
        pieces = splitting.pieces
        if min(splitting.free_bytes) < 0:
            return None
        if not pieces:
            return splitting.spread(())
        piece_task = dataclasses.replace(
            splitting.task, tables=pieces, topology=splitting.topology_of_pieces
        )
        ranks = self.policy.place(piece_task, num_samples=self.num_samples, seed=self.seed)
        return None if ranks is None else splitting.spread(ranks)

    def _not_found(self, task: ShardingTask) -> str:
        topology, used = task.topology, task.table_bytes
        advice = "use sharder=search" if self.split else "set sharder.split=true"
        return (
            f"sharder={self.name} could not fit {len(task.tables)} "
            f"{'tables, split ever finer' if self.split else 'whole tables'}, of {used:,} B "
            f"({used / GIB:.2f} GiB) on {topology.world_size} ranks with "
            f"{sum(topology.rank_memory_bytes):,} B in all; this does not prove that no plan fits. "
            f"Add ranks or memory ({MEMORY_KEYS}), or {advice}"
        )


def policy_sharder(
    context: SharderContext,
    *,
    method: str,
    artifact: str | None = None,
    prices: str = AUTO,
    **options: Any,
) -> PolicySharder:
    """Build a sharder with the policy that a method trained for some hardware.

    Args:
        prices: one of `rl.learned_policy.WITH_COSTS`, which says whether the policy reads the run's
            costs in place of those that its network predicts: `never` as published, `auto` on other
            hardware.
        options: arguments of `PolicySharder`.
    """
    has_costs = prices == ALWAYS or is_additive(context.cost_model)
    with_costs = context.costs_for(f"{method} with sharder.prices=always") if has_costs else None
    return PolicySharder(
        load_policy(method, artifact, context.run, with_costs=with_costs, reads_costs=prices),
        name=method,
        cost_model=context.cost_model,
        **options,
    )


def _check_feasible(task: ShardingTask, *, split: bool) -> None:
    """Raise InfeasibleTaskError if it is certain that the policy finds no plan."""
    topology = task.topology
    if reason := why_too_large(task, topology.rank_memory_bytes):
        raise InfeasibleTaskError(reason)
    if reason := why_too_wide(task, splits=split):
        raise InfeasibleTaskError(reason)
    if not split:
        largest = max(task.tables, key=topology.table_bytes)
        place_greedily(task, [largest], [1.0], least_loaded)  # raises if it fits no rank
