"""NeuroShard (arXiv:2305.01868), sec. 3.3: search for a plan on a learned cost model.

An outer search decides what is split, and an inner one places the pieces. Departures from the
published search, each for one of its faults, which `neuroshard_paper` keeps:
- Columns are cut at any multiple of 4, and rows into the blocks that TorchRec trains.
- The choice of cuts follows from a lower bound of the cost, not from a beam of ten steps.
- Placements are improved by swaps, and repaired if memory is short.
- A split must gain more than the model's error on it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.files.errors import (
    ConfigError,
    InfeasibleTaskError,
    InvalidPlanError,
    check_count,
    check_number,
)
from dlrm_sharded.plans.plan import ShardingPlan, read_plan, with_load_factors
from dlrm_sharded.plans.precision import (
    SAMPLE_MULTIPLE,
    TABLE_BYTES,
    ExchangePrecision,
    why_not_exchanged,
)
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, MAX_COLUMNS
from dlrm_sharded.plans.task import (
    GIB,
    MAX_BYTES,
    MEMORY_KEYS,
    ShardingTask,
    without_memory_limit,
)
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.search.build_problem import MAX_WIDTHS, build_problem
from dlrm_sharded.search.constraints import Constraints
from dlrm_sharded.search.feasibility import why_infeasible
from dlrm_sharded.search.find_plan import find_state, improve_within
from dlrm_sharded.search.move_budget import MoveBudget
from dlrm_sharded.search.problem import Problem
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import load_plan, state_shards
from dlrm_sharded.search.stopping import Clock, StoppingRule
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.caching import (
    CachedState,
    cached_problem,
    find_cached_state,
    where_caching_fits,
)
from dlrm_sharded.sharders.precision_choice import plan_of_best_precision
from dlrm_sharded.sharders.table_precision import (
    in_half,
    plan_that_fits,
    with_precisions_of,
)

AUTO = "auto"
GOOD_GAP = 0.003
CACHE_TABLES = (AUTO, "never")
ASK_FOR_CACHES = "with sharder.cache_tables=auto, which no GPU has measured yet: "


class NeuroShardSharder:
    """Searches for the plan of the least predicted cost.

    Args:
        context: has an additive cost model.
        critical_path_share: weight of the critical path in the objective; the rest is the cost.
        time_budget_s: time after which the search returns its best plan; small tasks end earlier.
        patience: each part of the search ends after this many rebuilds in a row without a better
            plan.
        split_error: a piece of a table is priced higher by this share of its computation when it
            is decided what to split, so that a split gains more than the cost model is wrong about
            it (docs/notes/measurements.md, "What does a split cost?").
        exchange_precision: precision of exchanges; "auto" for the one whose plan is predicted
            cheapest, see `precision_choice`; None for that of the run.
        table_precision: precision of all tables; "auto" for fp16 where fp32 does not fit, see
            `table_precision`.
        pin, together, apart, unsplit, reserved_gib, replicate: see `Constraints`.
        warm_start: plan.json of an earlier plan, from which the search descends.
        max_moved_tables, max_moved_gib: limits on tables and memory that move away from the earlier
            plan; None for no limit.
        cache_tables: "auto" to keep tables in host memory and cache a part of their rows, if no
            other plan fits GPUs, which no GPU has measured yet; "never" to refuse such tasks.
    """

    name = "neuroshard"

    def __init__(
        self,
        context: SharderContext,
        *,
        critical_path_share: float = 0.05,
        seed: int = 0,
        time_budget_s: float = 10.0,
        patience: int = 10,
        split_error: float = 0.05,
        exchange_precision: Any = None,
        table_precision: str = "fp32",
        pin: Mapping[str, Sequence[int]] | None = None,
        together: Sequence[Sequence[str]] = (),
        apart: Sequence[Sequence[str]] = (),
        unsplit: Sequence[str] = (),
        reserved_gib: float | Sequence[float] = 0.0,
        replicate: str | Sequence[str] = "auto",
        warm_start: str | Path | None = None,
        max_moved_tables: int | None = None,
        max_moved_gib: float | None = None,
        cache_tables: str = "never",
    ) -> None:
        self._price = context.pricing_for(self.name)
        check_number("sharder.critical_path_share", critical_path_share, most=1.0)
        check_count("sharder.seed", seed, least=0)
        check_number("sharder.time_budget_s", time_budget_s, above=True)
        check_count("sharder.patience", patience, least=0)
        check_number("sharder.split_error", split_error)
        if table_precision not in (*TABLE_BYTES, AUTO):
            raise ConfigError(
                f"sharder.table_precision is {table_precision!r}; known: "
                f"{', '.join(TABLE_BYTES)}, auto"
            )
        if max_moved_tables is not None:
            check_count("sharder.max_moved_tables", max_moved_tables, least=0)
        if max_moved_gib is not None:
            check_number("sharder.max_moved_gib", max_moved_gib, most=MAX_BYTES / GIB)
        if warm_start is None and (max_moved_tables is not None or max_moved_gib is not None):
            raise ConfigError(
                "sharder.max_moved_tables and sharder.max_moved_gib limit moves away from an "
                "earlier plan; name its plan.json in sharder.warm_start"
            )
        if cache_tables not in CACHE_TABLES:
            raise ConfigError(
                f"sharder.cache_tables is {cache_tables!r}, must be {' or '.join(CACHE_TABLES)}"
            )
        self.chooses_exchange_precision = exchange_precision is not None
        self._table_precision = table_precision
        self._finds_precision = exchange_precision == AUTO
        self._precision = _stated_precision(exchange_precision, context.run.device)
        self._critical_path_share = critical_path_share
        self._seed = seed
        self._time_budget_s = time_budget_s
        self._patience = patience
        self._split_error = split_error
        self._constraints = Constraints(
            pin or {},
            together,
            apart,
            unsplit,
            reserved_gib,
            replicate,
        )
        self._warm_start = warm_start
        self._max_moved_tables = max_moved_tables
        self._cache_tables = cache_tables
        self._max_moved_bytes = None if max_moved_gib is None else int(max_moved_gib * GIB)

    def shard(self, task: ShardingTask) -> ShardingPlan:
        priced = self._price(task)
        self._constraints.check(task)
        if self._table_precision == AUTO:
            return plan_that_fits(priced.task, lambda tried: self._plan(priced.with_task(tried)))
        if self._table_precision == "fp16":
            halves = in_half(priced.task, [table.name for table in task.tables])
            return self._plan(priced.with_task(halves))
        return self._plan(priced)

    def _plan(self, priced: PricedTask) -> ShardingPlan:
        """Return the best plan for tables in the precisions that the task has."""
        if self._finds_precision:
            half_s = self._time_budget_s / 2
            return plan_of_best_precision(priced, lambda tried: self._search(tried, half_s))
        if self._precision is None:
            return self._search(priced, self._time_budget_s)
        plan = self._search(priced.with_precision(self._precision), self._time_budget_s)
        return dataclasses.replace(plan, exchange_precision=self._precision)

    def _search(self, priced: PricedTask, time_budget_s: float) -> ShardingPlan:
        """Return the best plan under the prices of a task, in any precision."""
        clock, task = _clock(time_budget_s), priced.task
        earlier = None if self._warm_start is None else _earlier(self._warm_start, task)
        problem = build_problem(
            priced,
            self._constraints,
            critical_path_share=self._critical_path_share,
            split_error=self._split_error,
            # an earlier plan may have any widths
            max_widths=MAX_WIDTHS if earlier is None else MAX_COLUMNS // COLUMN_MULTIPLE,
            all_replicas=earlier is not None,
        )
        load_factors: dict[str, float] = {}
        if earlier is not None:
            load_factors, earlier = earlier.load_factors, with_load_factors(earlier, {})
            state = self._near(cached_problem(problem, load_factors), earlier, clock)
        elif (best := self._find(problem, clock)) is not None:
            state = best
        else:
            cached = self._with_caches(problem, time_budget_s)
            state, load_factors = cached.state, cached.load_factors
        by_table = None if earlier is None else earlier.shards_by_table()
        plan = ShardingPlan(task.topology.world_size, state_shards(state, by_table))
        # The search's prices are linear in exchanged bytes, so what it improves may cost more.
        if earlier and self._value_ms(plan, priced) > self._value_ms(earlier, priced):
            plan = earlier
        plan = with_load_factors(plan, load_factors) if load_factors else plan
        return with_precisions_of(plan, task)

    def _value_ms(self, plan: ShardingPlan, priced: PricedTask) -> float:
        """Return the predicted cost and critical path of a plan, weighed as in the objective."""
        cost = priced.predict(plan)
        share = self._critical_path_share
        return (1.0 - share) * cost.cost_ms + share * cost.critical_path_ms

    def _find(self, problem: Problem, clock: Clock) -> State | None:
        """Return the best state found; None if none fits, or none was found."""
        if why_infeasible(problem):
            return None
        # Plans that the search does not make are no reason for it to go on.
        replicas, priced = problem.replicas is not None, problem.priced
        bound_ms = lower_bound_ms(priced, replicas=replicas)
        if bound_ms == math.inf:  # tables fit because of caches, which the bound ignores
            unlimited = priced.with_task(without_memory_limit(priced.task))
            bound_ms = lower_bound_ms(unlimited, replicas=replicas)
        stopping = StoppingRule(self._patience, GOOD_GAP, clock)
        return find_state(problem, bound_ms, self._seed, stopping)

    def _with_caches(self, problem: Problem, time_budget_s: float) -> CachedState:
        """Find a plan with cached tables for a task that has no other.

        Raises:
            InfeasibleTaskError: there is none; the message says where one would fit.
        """
        # Tables in fp16 cannot be cached, and where they may be in fp16, that costs less.
        is_asked, can_cache = self._cache_tables == AUTO, self._table_precision == "fp32"
        if is_asked and can_cache:
            found = find_cached_state(problem, lambda p: self._find(p, _clock(time_budget_s)))
            if found is not None:
                return found
        reason, elsewhere = why_infeasible(problem) or _not_found(problem), None
        if can_cache and problem.task.table_bytes > problem.capacity_bytes.sum():
            elsewhere = where_caching_fits(problem, "" if is_asked else ASK_FOR_CACHES)
        raise InfeasibleTaskError(reason if elsewhere is None else f"{reason}; {elsewhere}")

    def _near(self, problem: Problem, earlier: ShardingPlan, clock: Clock) -> State:
        state, by_table = State(problem), earlier.shards_by_table()
        if not load_plan(state, by_table):
            raise InvalidPlanError(
                f"the plan {self._warm_start} violates sharder.pin, together, apart, unsplit, "
                "reserved_gib or replicate, has row blocks that leave no memory, or has shards of "
                "a table on one rank that are too wide as one shard; start without "
                "sharder.warm_start"
            )
        budget = MoveBudget(state, by_table, self._max_moved_tables, self._max_moved_bytes)
        improve_within(state, budget, self._seed, clock)
        return state


def _clock(time_budget_s: float) -> Clock:
    return Clock(time.perf_counter() + time_budget_s)


def _stated_precision(value: Any, device: str) -> ExchangePrecision | None:
    """Return the precision that the key names; None if it names none."""
    if value is None or value == AUTO:
        return None
    try:
        precision = ExchangePrecision.parse(value)
    except ConfigError as error:
        raise ConfigError(f"sharder.{error}, or auto") from error
    if reason := why_not_exchanged(precision, device, SAMPLE_MULTIPLE):
        raise ConfigError(f"sharder.{reason}")
    return precision


def _earlier(path: str | Path, task: ShardingTask) -> ShardingPlan:
    plan = read_plan(path)
    validate(plan, task)
    return plan


def _not_found(problem: Problem) -> str:
    used, capacity = problem.size_bytes[problem.whole_shape].sum(), problem.capacity_bytes.sum()
    return (
        f"no plan was found for {len(problem.task.tables)} tables of {used:,} B "
        f"({used / GIB:.2f} GiB) on {problem.world_size} ranks with {capacity:,} B in all; that "
        f"there is none is not proven. Add ranks or memory ({MEMORY_KEYS}), or drop constraints"
    )
