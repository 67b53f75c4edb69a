"""A sharder that places tables, or pieces of tables that do not fit, by a trained policy."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.base import CostModel, PricedTask, is_additive, price
from dlrm_sharded.files.errors import InfeasibleTaskError, check_count, check_flag
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.plans.task_keys import MEMORY_KEYS
from dlrm_sharded.plans.validation import why_too_large, why_too_wide
from dlrm_sharded.rl.base import Candidate, Policy
from dlrm_sharded.rl.policy import ALWAYS, AUTO, load_policy
from dlrm_sharded.search.build_problem import worth_replicating
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.heuristics import WEIGHTS, GreedySharder, least_loaded, place_greedily
from dlrm_sharded.sharders.splitting import Splitting, splittings, unsplit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PolicySharder:
    """Places tables by a trained policy, and splits them ever finer until all of them fit.

    Alone, as published, the policy's own cost network chooses among its placements. In a portfolio,
    these and the placements of the heuristics `WEIGHTS`, with and without replicas, are candidates
    for the plan, and the one whose predicted cost is the lowest is taken. So a policy of other
    hardware is never behind the best heuristic by the prices of the run.

    Args:
        num_samples: number of placements to sample besides the most probable one.
        split: whether tables may be split, see `splitting.splittings`.
        replicate: whether tables may be replicated, where that pays by an additive cost model.
        cost_model: prices of the run, by which a portfolio is judged; None for the policy alone.
        exchange_precision: precision of exchanges for which plans are priced.
        complete: gives tables without an access profile the one that the run's cost model assumes.
    """

    policy: Policy
    _: KW_ONLY
    name: str
    num_samples: int = 16
    split: bool = True
    replicate: bool = True
    seed: int = 0
    cost_model: CostModel | None = None
    exchange_precision: ExchangePrecision = FP32_EXCHANGE
    complete: Callable[[ShardingTask], ShardingTask] = with_profiles

    def __post_init__(self) -> None:
        check_count("sharder.num_samples", self.num_samples, least=0)
        check_flag("sharder.split", self.split)
        check_flag("sharder.replicate", self.replicate)
        check_count("sharder.seed", self.seed, least=0)

    @property
    def plans_by_prices(self) -> bool:
        """Tell whether the policy reads the run's prices, or these judge a portfolio."""
        return self.cost_model is not None or getattr(self.policy, "reads_prices", False)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        _check_feasible(task, split=self.split)
        task = self.complete(task)
        priced = price(self.cost_model, task, self.exchange_precision)
        for splitting in splittings(task) if self.split else [unsplit(task)]:
            plans = self._plans(splitting)
            if plans:
                pays = worth_replicating(priced) if self.replicate and priced else set()
                with_replicas = splitting.with_replicas(pays)
                if with_replicas != splitting:
                    plans |= self._plans(with_replicas, " beside replicas")
                return self._cheapest(plans, task, priced)
        raise InfeasibleTaskError(self._not_found(task))

    def _plans(self, splitting: Splitting, suffix: str = "") -> dict[ShardingPlan, str]:
        """Return plans of a splitting, each with its origin."""
        plans: dict[ShardingPlan, str] = {}
        for candidate in self._candidates(splitting):
            if (ranks := splitting.spread(candidate.ranks)) is not None:
                plan = ShardingPlan(splitting.task.topology.world_size, splitting.shards(ranks))
                plans.setdefault(plan, candidate.origin + suffix)
        return plans

    def _candidates(self, splitting: Splitting) -> list[Candidate]:
        """Return placements of the pieces that fit, those of the policy first."""
        pieces = splitting.pieces
        if min(splitting.free_bytes) < 0:
            return []
        if not pieces:
            return [Candidate((), "every table on all ranks")]
        of_pieces = dataclasses.replace(
            splitting.task, tables=pieces, topology=splitting.topology_of_pieces
        )
        if self.cost_model is None:
            ranks = self.policy.place(of_pieces, num_samples=self.num_samples, seed=self.seed)
            return [] if ranks is None else [Candidate(ranks, "the policy's")]
        placed = self.policy.candidates(of_pieces, num_samples=self.num_samples, seed=self.seed)
        return [*placed, *_heuristic_candidates(of_pieces, self.seed)]

    def _cheapest(
        self, plans: dict[ShardingPlan, str], task: ShardingTask, priced: PricedTask | None
    ) -> ShardingPlan:
        """Return the first plan with the lowest predicted cost; the only one without a model."""
        if self.cost_model is None:
            [plan] = plans
            return plan
        model = self.cost_model
        # a priced task predicts without a warning for each plan
        costs = {
            plan: (model.predict(plan, task) if priced is None else priced.predict(plan)).cost_ms
            for plan in plans
        }
        cheapest = min(costs, key=costs.__getitem__)
        log.info(
            "sharder=%s: the cheapest of %d placements is %s, predicted %.2f ms",
            self.name,
            len(plans),
            plans[cheapest],
            costs[cheapest],
        )
        return cheapest

    def _not_found(self, task: ShardingTask) -> str:
        topology, used = task.topology, task.table_bytes
        advice = "use sharder=neuroshard" if self.split else "set sharder.split=true"
        return (
            f"sharder={self.name} found no room for {len(task.tables)} "
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
    portfolio: bool = False,
    prices: str = AUTO,
    **options: Any,
) -> PolicySharder:
    """Build a sharder with the policy that a method trained for some hardware.

    Args:
        portfolio: whether the run's prices choose between the policy, the heuristics and replicas;
            else the policy is alone, as published.
        prices: one of `rl.policy.PRICES`, whether the policy reads the run's prices in place of the
            costs that its network predicts; `never` as published, `auto` on other hardware.
        options: arguments of `PolicySharder`.
    """
    check_flag("sharder.portfolio", portfolio)
    name = f"{method}_portfolio" if portfolio else method
    can_price = prices == ALWAYS or is_additive(context.cost_model)
    price_task = context.pricing_for(f"{name} with sharder.prices=always") if can_price else None
    return PolicySharder(
        load_policy(method, artifact, context.run, price=price_task, prices=prices),
        name=name,
        cost_model=context.cost_model if portfolio else None,
        exchange_precision=context.exchange_precision,
        complete=context.with_profiles,
        **options,
    )


def _heuristic_candidates(task: ShardingTask, seed: int) -> list[Candidate]:
    """Return the placement of each heuristic that finds room for all tables."""
    found = []
    for weight in WEIGHTS:
        try:
            plan = GreedySharder(weight, seed=seed).shard(task)
        except InfeasibleTaskError:
            continue
        rank_of = {shard.table: shard.rank for shard in plan.shards}
        ranks = tuple(rank_of[table.name] for table in task.tables)
        found.append(Candidate(ranks, f"the heuristic {weight}"))
    return found


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
