"""This project's own search for a plan on a cost model, after NeuroShard (arXiv:2305.01868).

An outer search decides what is split, and an inner one places the pieces. Each departure from the
published search corrects one of its weaknesses, which `sharder=neuroshard` keeps:
- Columns are cut at any multiple of 4, and rows into the blocks that TorchRec trains.
- The choice of cuts follows from a lower bound of the cost, not from a beam of ten steps.
- Placements are improved by swaps, and repaired if memory is short.
- A split must gain more than the model's error on it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.files.errors import (
    ConfigError,
    InfeasibleTaskError,
    InvalidPlanError,
    check_choice,
    check_count,
    check_number,
)
from dlrm_sharded.plans.plan import ShardingPlan, with_exchanges_of, with_precisions_of
from dlrm_sharded.plans.precision import (
    SAMPLE_MULTIPLE,
    TABLE_BYTES,
    ExchangePrecision,
    why_not_exchanged,
)
from dlrm_sharded.plans.task import GIB, ShardingTask
from dlrm_sharded.search.build_problem import SPLIT_ERROR, build_problem
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.feasibility import why_none_found
from dlrm_sharded.search.find_plan import ALL_WIDTHS, find_from_scratch, improve_within
from dlrm_sharded.search.move_budget import MoveBudget
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.starts import are_few
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import load_plan, state_shards
from dlrm_sharded.search.stopping import Clock
from dlrm_sharded.sharders.base import SharderContext, in_stated_precision


@dataclass(frozen=True, slots=True, eq=False)
class SearchSharder:
    """Searches for the plan of the least predicted cost.

    Args:
        context: has an additive cost model.
        constraints: what users require of the plan, besides a low cost.
        critical_path_share: weight of the critical path in the cost; the rest is the embedding
            cost.
        time_budget_s: time after which the whole search returns its best plan; small tasks end
            earlier. None for no limit, so that a plan is the same on a loaded machine.
        patience: effort in rounds: each part of the search ends after this many rebuilds in a row,
            or twice as many on small tasks, without a better plan.
        split_error: share that is added to the computation of a part of a table when the search
            decides what to split, so that a split gains more than the cost model's error on it;
            None for 0.05.
        exchange_precision: precision of exchanges; None for the run's.
        table_precision: "fp32" to keep the precisions of the task's tables, "fp16" for all in fp16.
    """

    name: ClassVar[str] = "search"
    uses_costs: ClassVar[bool] = True

    context: SharderContext
    constraints: Constraints = field(default_factory=Constraints)
    _: KW_ONLY
    critical_path_share: float = 0.05
    seed: int = 0
    time_budget_s: float | None = 10.0
    patience: int = 10
    split_error: float | None = None
    exchange_precision: Any = None
    table_precision: str = "fp32"

    def __post_init__(self) -> None:
        self.context.costs_for(self.name)  # raises if the run has no additive cost model
        check_number("sharder.critical_path_share", self.critical_path_share, most=1.0)
        check_count("sharder.seed", self.seed, least=0)
        if self.time_budget_s is not None:
            check_number("sharder.time_budget_s", self.time_budget_s, above=True)
        check_count("sharder.patience", self.patience, least=0)
        if self.split_error is not None:
            check_number("sharder.split_error", self.split_error)
        check_choice("sharder.table_precision", self.table_precision, TABLE_BYTES)
        precision = _stated_precision(self.exchange_precision, self.context.run.device)
        object.__setattr__(self, "exchange_precision", precision)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        self.constraints.check(task)
        clock = Clock.starting_now(self.time_budget_s)
        task = in_stated_precision(self, task)
        costed = self.context.costs_for(self.name)(task)
        earlier = self.constraints.earlier_plan(costed.task)
        if earlier is None:
            plan = self._from_scratch(costed, clock)
        else:
            plan = self._improved(earlier, costed, clock)
        return with_exchanges_of(with_precisions_of(plan, costed.task), task)

    def _problem(
        self, costed: CostedTask, *, max_widths: int, all_replicas: bool = False
    ) -> Problem:
        split_error = SPLIT_ERROR if self.split_error is None else self.split_error
        return build_problem(
            costed,
            self.constraints,
            critical_path_share=self.critical_path_share,
            split_error=split_error,
            max_widths=max_widths,
            all_replicas=all_replicas,
        )

    def _from_scratch(self, costed: CostedTask, clock: Clock) -> ShardingPlan:
        is_few = are_few(len(costed.task.tables), costed.task.topology.world_size)
        state, problem = find_from_scratch(
            lambda max_widths: self._problem(costed, max_widths=max_widths, all_replicas=is_few),
            self.seed,
            self.patience,
            clock,
        )
        if state is None:
            raise InfeasibleTaskError(why_none_found(problem))
        return ShardingPlan(problem.world_size, state_shards(state))

    def _improved(self, earlier: ShardingPlan, costed: CostedTask, clock: Clock) -> ShardingPlan:
        """Return an earlier plan after moves within the limits, or unchanged if it costs less."""
        limits, by_table = self.constraints, earlier.shards_by_table()
        # an earlier plan may have any widths and any replicas
        state = State(self._problem(costed, max_widths=ALL_WIDTHS, all_replicas=True))
        if not load_plan(state, by_table):
            raise InvalidPlanError(
                f"the plan {limits.warm_start} violates sharder.pin, together, apart, unsplit, "
                "split, rows, reserved_gib or replicate, has row blocks that leave no memory, or "
                "has shards of a table on one rank that are too wide as one shard; start without "
                "sharder.warm_start"
            )
        max_gib = limits.max_moved_gib
        max_bytes = None if max_gib is None else int(max_gib * GIB)
        budget = MoveBudget(state, by_table, limits.max_moved_tables, max_bytes)
        improve_within(state, budget, self.seed, clock)
        plan = ShardingPlan(earlier.world_size, state_shards(state, by_table))
        # The search's costs are linear in exchanged bytes, so what it improves may cost more.
        share = self.critical_path_share
        return min(plan, earlier, key=lambda plan: costed.predict(plan).weighed_ms(share))


def search_sharder(context: SharderContext, **keys: Any) -> SearchSharder:
    """Build the sharder from flat keys, as conf/sharder/search.yaml and overrides have them.

    Args:
        keys: the fields of `Constraints`, and the other arguments of `SearchSharder`.
    """
    keys["pin"] = keys.get("pin") or {}  # null pins nothing
    names = {field.name for field in dataclasses.fields(Constraints)} & keys.keys()
    constraints = Constraints(**{name: keys.pop(name) for name in names})
    return SearchSharder(context, constraints, **keys)


def _stated_precision(value: Any, device: str) -> ExchangePrecision | None:
    """Return the precision that `sharder.exchange_precision` names; None if it names none."""
    if value is None:
        return None
    try:
        precision = ExchangePrecision.parse(value)
    except ConfigError as error:
        raise ConfigError(f"sharder.{error}") from error
    if reason := why_not_exchanged(precision, device, SAMPLE_MULTIPLE):
        raise ConfigError(f"sharder.{reason}")
    return precision
