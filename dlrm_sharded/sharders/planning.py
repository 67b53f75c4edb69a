"""Makes plans that can be trained, and reports on their predicted cost."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.accesses.profiles import ASSUMED_EXPONENT, SKEWS
from dlrm_sharded.cost.base import (
    CostedTask,
    CostModel,
    caveat_of,
    cost_task,
    costs_name,
    is_additive,
    predict_plan,
    provenance_of,
    with_assumed_profiles,
)
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.cost_model_file import costs_digest
from dlrm_sharded.cost.expected_maximum import with_expected_excess
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.provenance import commit, versions
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.plan import ShardingPlan, with_exchanges_of, with_precisions
from dlrm_sharded.plans.plan_report import Diagnosis, MadeFrom, PlanReport, ProfileValue
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.sharders.base import Sharder, SharderContext, in_stated_precision, sharder_name

log = logging.getLogger(__name__)

Diagnose = Callable[[ShardingPlan, CostedTask], Diagnosis]
ValueProfiles = Callable[[ShardingPlan, ShardingTask, CostedTask], ProfileValue]


@dataclass(frozen=True, slots=True)
class Planner:
    """A sharder and a cost model that evaluates its plans.

    Args:
        cost_model: predicts the cost of plans; None for no prediction.
        diagnose: explains the prediction; None for no explanation.
        value_profiles: says what it would be worth to measure missing profiles; None for no such
            figures.
        exchange_precision: precision of exchanges in plans whose sharder sets none.
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
        """Return whether plans depend on the run's cost model, see `Sharder`."""
        stated = getattr(self.sharder, "uses_costs", None)
        return self.has_context if stated is None else bool(stated)

    @property
    def costs(self) -> str | None:
        """Name of the costs by which the sharder plans; None for none."""
        stated: str | None = getattr(self.sharder, "costs", None)
        if stated is not None or not self.uses_costs or self.cost_model is None:
            return stated
        return costs_name(self.cost_model)

    def plan(self, task: ShardingTask) -> tuple[ShardingPlan, PlanReport]:
        """Return the sharder's validated plan and a report on it.

        Raises:
            ShardingError: there is no plan, or the sharder's plan cannot be trained.
            ConfigError: the sharder does not return a plan, or the cost model fails.
        """
        given = self._in_precision(task)
        task = with_assumed_profiles(self.cost_model, given)
        if task != given:
            _warn_about_assumed_profiles(given, self.cost_model)
        started = time.perf_counter()
        plan = self.sharder.shard(task)
        solve_s = time.perf_counter() - started
        if not isinstance(plan, ShardingPlan):
            name, made = type(self.sharder).__name__, type(plan).__name__
            raise ConfigError(f"{name}.shard returned a {made}, which is not a ShardingPlan")
        return self._reported(plan, given, task, solve_s)

    def adopt(
        self, plan: ShardingPlan, task: ShardingTask, *, solve_s: float
    ) -> tuple[ShardingPlan, PlanReport]:
        """Return a plan that the sharder made earlier, and a report on it.

        Args:
            solve_s: time that the sharder took.

        Raises:
            InvalidPlanError: the plan does not fit the task.
        """
        given = self._in_precision(task)
        return self._reported(plan, given, with_assumed_profiles(self.cost_model, given), solve_s)

    def _in_precision(self, task: ShardingTask) -> ShardingTask:
        """Return the task in the planner's precisions, or in the sharder's if it sets its own."""
        task = dataclasses.replace(task, exchange_precision=self.exchange_precision)
        return in_stated_precision(self.sharder, task)

    def _reported(
        self, plan: ShardingPlan, given: ShardingTask, task: ShardingTask, solve_s: float
    ) -> tuple[ShardingPlan, PlanReport]:
        """Return a plan once it is validated, with the report on it.

        Args:
            given: the task without assumed access profiles.
            task: with them.
        """
        plan = with_exchanges_of(plan, task)
        validate(plan, task)
        given, task = with_precisions(given, plan), with_precisions(task, plan)
        model, costed = self.cost_model, cost_task(self.cost_model, task)
        if costed is None:
            provenance, caveat = provenance_of(model), caveat_of(model, task.topology)
        else:
            provenance, caveat = costed.provenance, costed.caveat
        cost = bound_ms = diagnosis = profile_value = None
        if model is not None:
            cost = predict_plan(model, plan, task)
            cost = with_expected_excess(cost, provenance.rank_error if provenance else None)
        if costed is not None:
            if provenance is not None and isinstance(model, LearnedCostModel):
                workload = workload_of_plan(plan, costed.task)
                provenance = provenance.extrapolated(model.beyond_range(workload))
            # A bound on times that do not hold here would read as a bound on the real times.
            bound_ms = None if caveat else lower_bound_ms(costed)
            diagnosis = self.diagnose(plan, costed) if self.diagnose else None
            if self.value_profiles and given != task:
                profile_value = self.value_profiles(plan, given, costed)
        return plan, PlanReport(
            sharder=sharder_name(self.sharder),
            solve_s=solve_s,
            costs=self.costs,
            cost=cost,
            provenance=provenance,
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
        digest = None if model is None else costs_digest(model)
        correction = None if model is None else model.correction
        return MadeFrom(self.options, digest, correction, *_software())


@dataclass(frozen=True, slots=True)
class PlannerFactory:
    """Makes planners for ranks, once it is known what they compute on.

    Args:
        sharder: a sharder, or a partial call that makes one from a `SharderContext`.
        cost_model: a cost model, a partial call that makes one from a `RunContext`, or None for no
            prediction.
        diagnose, value_profiles, exchange_precision, options: see `Planner`.
    """

    sharder: Sharder | functools.partial[Sharder]
    cost_model: CostModel | functools.partial[CostModel] | None
    diagnose: Diagnose | None = None
    value_profiles: ValueProfiles | None = None
    exchange_precision: ExchangePrecision = FP32_EXCHANGE
    options: Mapping[str, Any] | None = None

    def planner(self, context: RunContext, *, cost_model: CostModel | None = None) -> Planner:
        """Return the planner for ranks.

        Args:
            cost_model: cost model that other planners use for these ranks; None to make one.

        Raises:
            ConfigError: the sharder or the cost model cannot be made, or lacks its method.
        """
        model = cost_model or made("cost_model", self.cost_model, context, method="predict")
        sharder_context = SharderContext(context, model)
        return Planner(
            sharder=made("sharder", self.sharder, sharder_context, method="shard"),
            cost_model=model,
            diagnose=self.diagnose,
            value_profiles=self.value_profiles,
            exchange_precision=self.exchange_precision,
            options=self.options,
            has_context=isinstance(self.sharder, functools.partial),
        )


def planners_for(context: RunContext, factories: Iterable[PlannerFactory]) -> list[Planner]:
    """Return a planner from each factory; they share the cost model of the first."""
    planners: list[Planner] = []
    for factory in factories:
        shared = planners[0].cost_model if planners else None
        planners.append(factory.planner(context, cost_model=shared))
    return planners


def made(group: str, given: Any, context: RunContext | SharderContext, *, method: str) -> Any:
    """Return the object of a config group, which a partial call makes from the context."""
    if isinstance(given, functools.partial):
        try:
            given = given(context)
        except TypeError as error:  # a key that the function does not have
            raise ConfigError(f"{group}: {error}") from error
    if given is not None and not hasattr(given, method):
        raise ConfigError(f"{group}._target_ makes {given!r}, which has no method `{method}`")
    return given


@functools.cache
def _software() -> tuple[str | None, dict[str, str]]:
    """Return commit and versions, which are looked up once in a process."""
    return commit(), versions()


def _warn_about_assumed_profiles(task: ShardingTask, model: CostModel | None) -> None:
    """Say what is assumed about tables without an access profile, if there is a cost model."""
    if model is None:
        return
    if is_additive(model):
        assumption = f"exponents from {min(SKEWS):g} to {max(SKEWS):g}, and takes the mean cost"
    else:
        assumption = f"exponent {ASSUMED_EXPONENT:g}"
    log.warning(
        "%d of %d tables have no reuse_histogram; the cost model assumes that their accesses "
        "follow Zipf distributions with %s",
        sum(table.reuse_histogram is None for table in task.tables),
        len(task.tables),
        assumption,
    )
