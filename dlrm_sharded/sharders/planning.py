"""Makes plans that can be trained, and reports on their predicted cost."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.accesses.profiles import ASSUMED_EXPONENT, SKEWS, with_profiles
from dlrm_sharded.cost.base import (
    CostModel,
    PricedTask,
    caveat_of,
    costs_name,
    predict_plan,
    price,
    standing_of,
    with_assumed_profiles,
)
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.expected_maximum import with_expected_excess
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.price_file import prices_digest
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.plans.plan import ShardingPlan, with_precisions
from dlrm_sharded.plans.plan_report import Diagnosis, MadeFrom, PlanReport, ProfileValue
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.sharders.base import (
    Sharder,
    chooses_precision,
    in_precision,
    sharder_name,
    uses_costs,
)

log = logging.getLogger(__name__)

Diagnose = Callable[[ShardingPlan, PricedTask], Diagnosis]
ValueProfiles = Callable[[ShardingPlan, ShardingTask, PricedTask], ProfileValue]


@dataclass(frozen=True, slots=True)
class Planner:
    """A sharder and a cost model that evaluates its plans.

    Args:
        cost_model: predicts the cost of plans; None for no prediction.
        diagnose: explains the prediction; None for no explanation.
        value_profiles: says what measured profiles would be worth where tables have none; None for
            no such figures.
        exchange_precision: precision of plans whose sharder does not choose one.
        options: the sharder's node of the config, for `PlanReport.made_from`; None without a
            config.
        has_context: whether the sharder was made with a `SharderContext`.
    """

    sharder: Sharder
    cost_model: CostModel | None
    diagnose: Diagnose | None = None
    value_profiles: ValueProfiles | None = None
    exchange_precision: ExchangePrecision = FP32_EXCHANGE
    options: Mapping[str, Any] | None = None
    has_context: bool = False

    def __repr__(self) -> str:
        model = repr(self.cost_model).partition("\n")[0]
        sharder, precision = sharder_name(self.sharder), self.exchange_precision
        return f"Planner: sharder {sharder}\n  cost model {model}\n  exchanges in {precision}"

    @property
    def uses_costs(self) -> bool:
        """Tell whether plans depend on the run's cost model, see `Sharder`."""
        return uses_costs(self.sharder, has_context=self.has_context)

    @property
    def costs(self) -> str | None:
        """Name of the costs that the sharder plans by; None for none."""
        stated: str | None = getattr(self.sharder, "costs", None)
        if stated is not None or not self.uses_costs or self.cost_model is None:
            return stated
        return costs_name(self.cost_model)

    def plan(self, task: ShardingTask) -> tuple[ShardingPlan, PlanReport]:
        """Return the sharder's validated plan and a report on it.

        Raises:
            ShardingError: there is no plan, or the sharder's plan cannot be trained.
            ConfigError: the sharder does not return a plan.
        """
        priced = price(self.cost_model, task, self.exchange_precision)
        profiled = with_assumed_profiles(self.cost_model, task)
        if profiled != task:
            _warn_about_assumed_profiles(task, is_priced=priced is not None)
        if self.cost_model is None:
            profiled = with_profiles(task)  # for sharders that read profiles
        started = time.perf_counter()
        plan = self.sharder.shard(profiled)
        solve_s = time.perf_counter() - started
        if not isinstance(plan, ShardingPlan):
            name, made = type(self.sharder).__name__, type(plan).__name__
            raise ConfigError(f"{name}.shard returned a {made}, which is not a ShardingPlan")
        plan = self._with_precision(plan)
        validate(plan, profiled)
        return plan, self._report(plan, task, priced, solve_s)

    def adopt(
        self, plan: ShardingPlan, task: ShardingTask, *, solve_s: float
    ) -> tuple[ShardingPlan, PlanReport]:
        """Return a plan that the sharder made earlier, and a report on it.

        Args:
            solve_s: time that the sharder took.

        Raises:
            InvalidPlanError: the plan does not fit the task.
        """
        plan = self._with_precision(plan)
        validate(plan, task)
        priced = price(self.cost_model, task, plan.exchange_precision)
        return plan, self._report(plan, task, priced, solve_s)

    def _with_precision(self, plan: ShardingPlan) -> ShardingPlan:
        """Return a plan with the precision of the run, unless the plan has one of its own."""
        return (
            plan if chooses_precision(self.sharder) else in_precision(plan, self.exchange_precision)
        )

    def _report(
        self, plan: ShardingPlan, task: ShardingTask, priced: PricedTask | None, solve_s: float
    ) -> PlanReport:
        """Report on a plan of a task as it was given, and with its prices."""
        model, unprofiled = self.cost_model, with_precisions(task, plan)
        if priced is None:
            task = with_assumed_profiles(model, unprofiled)
            standing, caveat = standing_of(model), caveat_of(model, task.topology)
        else:
            priced = priced.with_task(with_precisions(priced.task, plan))
            priced = priced.with_precision(plan.exchange_precision)
            task, standing, caveat = priced.task, priced.standing, priced.caveat
        cost = None
        if model is not None:
            cost = predict_plan(model, plan, task)
            cost = with_expected_excess(cost, standing.rank_error if standing else None)
        bound_ms = diagnosis = profile_value = None
        if priced is not None:
            # A bound of times that do not hold here would read as one of the real times.
            bound_ms = None if caveat else lower_bound_ms(priced)
            diagnosis = self.diagnose(plan, priced) if self.diagnose else None
            if self.value_profiles and unprofiled != task:
                profile_value = self.value_profiles(plan, unprofiled, priced)
        return PlanReport(
            sharder=sharder_name(self.sharder),
            solve_s=solve_s,
            costs=self.costs,
            cost=cost,
            standing=standing,
            caveat=caveat,
            lower_bound_ms=bound_ms,
            diagnosis=diagnosis,
            profile_value=profile_value,
            exchange_precision=plan.exchange_precision,
            made_from=self._made_from(),
        )

    def _made_from(self) -> MadeFrom | None:
        if self.options is None:
            return None
        model = self.cost_model if isinstance(self.cost_model, LearnedCostModel) else None
        digest = None if model is None else prices_digest(model)
        correction = None if model is None else model.correction
        return MadeFrom(self.options, digest, correction, *_software())


@functools.cache
def _software() -> tuple[str | None, dict[str, str]]:
    """Return commit and versions, which a process asks for once."""
    return commit(), versions()


def _warn_about_assumed_profiles(task: ShardingTask, *, is_priced: bool) -> None:
    unknown = sum(table.reuse_histogram is None for table in task.tables)
    if not unknown:
        return
    if is_priced:
        assumption = f"exponents from {min(SKEWS):g} to {max(SKEWS):g}, and takes the mean price"
    else:
        assumption = f"exponent {ASSUMED_EXPONENT:g}"
    log.warning(
        "%d of %d tables have no reuse_histogram; the cost model assumes that their accesses "
        "follow Zipf distributions with %s",
        unknown,
        len(task.tables),
        assumption,
    )
