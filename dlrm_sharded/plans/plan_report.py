"""Reports on plans: how a plan was found, its predicted cost, and its distance from the best.

A plan only says where shards are. Everything that a planner says about it is in a `PlanReport`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.plans.cost_provenance import CostProvenance
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.tables import Table


@dataclass(frozen=True, slots=True)
class ShardCost:
    """Time that one shard adds to its rank in lookups and exchanges."""

    shard: Shard
    table: Table
    compute_ms: float
    comm_ms: float

    @property
    def cost_ms(self) -> float:
        return self.compute_ms + self.comm_ms


@dataclass(frozen=True, slots=True)
class RankCost:
    """Cost of a rank and of its shards, the costliest first."""

    rank: int
    cost_ms: float
    shards: tuple[ShardCost, ...]

    @property
    def overhead_ms(self) -> float:
        """Time that its shards do not cause: launches, fixed and other ranks' exchange times."""
        return self.cost_ms - sum(shard.cost_ms for shard in self.shards)


@dataclass(frozen=True, slots=True)
class SplitGain:
    """The gain from splitting a table.

    Args:
        gain_ms: added cost of the plan if the table is whole, on the cheapest rank for it; None if
            the whole table fits no rank beside the other shards.
    """

    table: str
    num_shards: int
    kind: str
    gain_ms: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan that a short search without constraints finds for a changed task.

    Args:
        change: description of the change.
        cost_ms: cost of that plan; None if the search found nothing better than the present one.
    """

    change: str
    cost_ms: float | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """An explanation of a plan's predicted cost.

    Args:
        bounding: the costliest ranks, at most 8 of the `num_bounding` within 1 % of the costliest.
        splits: gains of split tables, the largest first; fewer than `num_split` on large plans.
        alternatives: None if they were not requested.
    """

    world_size: int
    cost_ms: float
    bounding: tuple[RankCost, ...]
    num_bounding: int
    splits: tuple[SplitGain, ...]
    num_split: int
    alternatives: tuple[Alternative, ...] | None


@dataclass(frozen=True, slots=True)
class ProfileValue:
    """What it is worth to measure the access profiles that a task lacks.

    Args:
        num_assumed: number of tables without a reuse histogram.
        least_ms, most_ms: range of the plan's predicted cost over the skews that are assumed
            possible, with the same skew in all of these tables.
        gain: fraction of the predicted cost that a search saves if it knows the profiles, averaged
            over drawn profiles; None if the task is too large, or nothing was found in time.
    """

    num_assumed: int
    least_ms: float
    most_ms: float
    gain: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the form of `profiles` in plan.json."""
        fields = dataclasses.asdict(self)
        return {"assumed": fields.pop("num_assumed"), **fields}


@dataclass(frozen=True, slots=True)
class MadeFrom:
    """What a plan was made from besides its task, so that it can be made again.

    This is `made_from` in plan.json.

    Args:
        sharder: the sharder's node of the config: its class and options, and its seed.
        prices_digest: hash of the cost model, if it is a learned one, see `cost.cost_model_file`.
        correction: see `LearnedCostModel`.
        commit, versions: of the software, see `files.provenance`.
    """

    sharder: Mapping[str, Any]
    prices_digest: str | None
    correction: Mapping[str, Sequence[float]] | None
    commit: str | None
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The planner's statements about a plan.

    Args:
        sharder: name of the sharder that made the plan.
        solve_s: time that the sharder took.
        costs: name of the costs that the sharder planned by; None if it used none.
        cost: predicted cost; None without a cost model.
        provenance: origin of the cost model behind `cost`; None if the model does not say.
        caveat: why `cost` says little about the ranks, see `cost.base.caveat_of`; None without one.
        lower_bound_ms: lower bound of `cost_ms` for all valid plans, without its `excess_ms`; None
            if not known.
        diagnosis: None if it was not requested or the cost model is not additive.
        profile_value: None if all profiles are known, or the cost model is not additive.
        exchange_precision: precision of the plan's exchanges.
        made_from: None for a sharder without a config.
    """

    sharder: str
    solve_s: float
    costs: str | None = None
    cost: PlanCost | None = None
    provenance: CostProvenance | None = None
    caveat: str | None = None
    lower_bound_ms: float | None = None
    diagnosis: Diagnosis | None = None
    profile_value: ProfileValue | None = None
    exchange_precision: ExchangePrecision = FP32_EXCHANGE
    made_from: MadeFrom | None = None

    @property
    def made_by(self) -> str:
        """The sharder with the costs that it planned by, as texts and plots name it."""
        return with_costs(self.sharder, self.costs)

    def __repr__(self) -> str:
        cost = "no cost model" if self.cost is None else f"predicted {self.cost.cost_ms:.4g} ms"
        gap = (
            "no lower bound" if self.gap is None else f"{100 * self.gap:.1f} % above a lower bound"
        )
        costs = "unknown costs" if self.provenance is None else self.provenance.text
        return f"PlanReport: {self.made_by}, in {self.solve_s:.2g} s\n  {cost}, {gap}\n  {costs}"

    @property
    def gap(self) -> float | None:
        """Distance of the predicted cost from the lower bound, relative to the bound.

        Both come from the cost model alone: the cost is without its `excess_ms`.
        """
        if self.cost is None or not self.lower_bound_ms:
            return None
        return (self.cost.cost_ms - self.cost.excess_ms) / self.lower_bound_ms - 1.0


def with_costs(sharder: str, costs: str | None) -> str:
    """Return a sharder's name with the costs that it planned by, such as search (costs: learned).

    Args:
        sharder: the name, perhaps with options in parentheses.
        costs: None for a sharder that uses none.
    """
    if costs is None:
        return sharder
    name = f"{sharder[:-1]}; " if sharder.endswith(")") else f"{sharder} ("
    return f"{name}costs: {costs})"


def plan_json(plan: ShardingPlan, report: PlanReport) -> dict[str, Any]:
    """Return the form of plan.json."""
    return {
        "sharder": report.sharder,
        "costs": report.costs,
        **plan.to_json(),
        "solve_s": report.solve_s,
        "lower_bound_ms": report.lower_bound_ms,
        "gap": report.gap,
        "caveat": report.caveat,
        "prices": None if report.provenance is None else report.provenance.to_json(),
        "profiles": None if report.profile_value is None else report.profile_value.to_json(),
        "predicted": None if report.cost is None else report.cost.to_json(),
        "made_from": None if report.made_from is None else dataclasses.asdict(report.made_from),
    }
