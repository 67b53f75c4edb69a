"""The planner: a plan, timed, named and judged in one call."""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable

import pytest

from dlrm_sharded import PlanCost, Planner, RunContext, ShardingPlan, ShardingTask, StageCost, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.commands.sharders import make_planner
from dlrm_sharded.cost.base import CostModel
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.expected_profiles import with_expected_profiles
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.published_nets import neuroshard_cost_model
from dlrm_sharded.explain.text import explain, forecast
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError, InvalidPlanError
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.plan_report import Diagnosis, plan_json, with_costs
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.sharders.base import sharder_name
from dlrm_sharded.sharders.heuristics import GreedySharder, RandomSharder
from tests.unit.conftest import OF_A_CPU
from tests.unit.synthetic import USED_ONCE, in_turns, task_of, with_memory, with_topology

PROFILED = Table("profiled", 1000, 16, 2.0, USED_ONCE)
TABLES = (PROFILED, Table("unprofiled", 500, 8, 1.0))
TASK = task_of(TABLES, memory_bytes=10**6, batch_size=64)
PLAN = in_turns(TASK)
ONE_MS = StageCost(1.0, 1.0, 1.0, 1.0)
SOLVE_S = 0.05


class Fixed:
    """Returns what it was made with, after a while."""

    def __init__(self, plan: object) -> None:
        self._plan = plan
        self.tasks: list[ShardingTask] = []

    def shard(self, task: ShardingTask) -> ShardingPlan:
        self.tasks.append(task)
        time.sleep(SOLVE_S)
        return self._plan


class Flat:
    """A cost model that knows nothing of shards: all ranks cost the same."""

    def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
        return PlanCost((ONE_MS,) * plan.world_size)


def test_a_report_says_that_costs_are_extrapolated() -> None:
    """Batches of 64 samples are smaller than any that was measured."""
    planner = Planner(GreedySharder("dim"), learned_cost_model(RunContext()))
    for task, is_beyond in ((TASK, True), (dataclasses.replace(TASK, batch_size=8192), False)):
        _, report = planner.plan(task)
        assert report.provenance is not None
        assert report.provenance.is_extrapolated == is_beyond


def test_names() -> None:
    assert sharder_name(GreedySharder("size_lookup")) == "size_lookup"
    assert sharder_name(RandomSharder()) == "random"
    assert sharder_name(Fixed(PLAN)) == "Fixed"


def test_reports_name_the_costs_of_the_sharder(model: LearnedCostModel) -> None:
    """A heuristic uses none, and one with a context those of the run unless it says others."""
    costs = {}
    for name in ("search", "size", "torchrec", "autoshard"):
        _, report = make_planner(
            name, model, run=RunContext("cpu", optimizer="rowwise_adagrad")
        ).plan(TASK)
        costs[name] = (plan_json(PLAN, report)["costs"], report.made_by)
    assert costs == {
        "search": ("learned", "search (costs: learned)"),
        "size": (None, "size"),
        "torchrec": ("its own", "torchrec (costs: its own)"),
        "autoshard": ("its own", "autoshard (costs: its own)"),
    }
    assert with_costs("torchrec (full=true)", "its own") == "torchrec (full=true; costs: its own)"


def test_without_a_cost_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    plan, report = Planner(Fixed(PLAN), None).plan(TASK)
    assert plan == PLAN
    assert report.sharder == "Fixed"
    assert report.solve_s >= SOLVE_S
    assert (report.cost, report.lower_bound_ms, report.gap, report.diagnosis) == (None,) * 4
    assert caplog.messages == [], "nothing is predicted, so nothing is assumed"


def test_with_a_cost_model_that_only_predicts(caplog: pytest.LogCaptureFixture) -> None:
    """It knows no bound, and there is nothing to diagnose by."""
    model = Flat()

    def diagnose(*_: object) -> Diagnosis:
        raise AssertionError

    _, report = Planner(Fixed(PLAN), model, diagnose).plan(TASK)
    assert report.cost == model.predict(PLAN, TASK)
    assert (report.lower_bound_ms, report.gap, report.diagnosis) == (None,) * 3


def test_with_an_additive_cost_model(model: LearnedCostModel) -> None:
    said = Diagnosis(2, 1.0, (), 0, (), 0, None)
    asked = []

    def diagnose(*of: object) -> Diagnosis:
        asked.append(of)
        return said

    sharder = Fixed(PLAN)
    _, report = Planner(sharder, model, diagnose).plan(TASK)
    profiled = with_expected_profiles(TASK, model.compute)
    assert report.cost == model.predict(PLAN, profiled)
    assert report.lower_bound_ms == lower_bound_ms(model.cost_task(profiled)) > 0
    assert report.gap == report.cost.cost_ms / report.lower_bound_ms - 1
    assert report.diagnosis is said
    assert asked == [(PLAN, model.cost_task(profiled))]
    assert sharder.tasks == [profiled], "all see the task with the same profiles"
    assert Planner(Fixed(PLAN), model).plan(TASK)[1].diagnosis is None


@pytest.mark.parametrize(
    "load", [functools.partial(learned_cost_model, artifact=OF_A_CPU), neuroshard_cost_model]
)
def test_times_of_another_device_bound_nothing(
    load: Callable[[RunContext], CostModel], caplog: pytest.LogCaptureFixture
) -> None:
    """The packaged files are of a CPU, and so are their predictions for GPUs."""
    on_gpus = with_topology(TASK, compute_device="cuda")
    for task, context in ((TASK, RunContext("cpu")), (on_gpus, RunContext("cuda"))):
        caplog.clear()
        model = load(context)
        _, report = Planner(Fixed(PLAN), model).plan(task)
        assert (report.caveat is None) == (task is TASK)
        assert ("says nothing about this device" in caplog.text) == (task is on_gpus)
    assert (report.lower_bound_ms, report.gap) == (None, None)
    assert "another device (cpu" in str(report.caveat)
    assert "than the ranks' (cuda)" in str(report.caveat)
    written = plan_json(PLAN, report)
    said = [written[key] for key in ("lower_bound_ms", "gap", "caveat")]
    assert said == [None, None, report.caveat]
    shown = explain(PLAN, report, on_gpus, None)
    assert str(report.caveat) in shown
    assert "lower bound" not in f"{shown} {forecast(report)}"


def test_the_bound_of_a_task_that_nothing_fits(model: LearnedCostModel) -> None:
    """No plan of it is valid, so no report has it."""
    tight = with_memory(with_profiles(TASK), 100)
    assert lower_bound_ms(model.cost_task(tight)) == math.inf
    with pytest.raises(InvalidPlanError, match="rank 0 would hold"):
        Planner(Fixed(PLAN), model).plan(tight)


@pytest.mark.parametrize("make_model", [Flat, None], ids=["only_predicts", "additive"])
def test_says_once_which_profiles_it_assumes(
    make_model: Callable[[], Flat] | None, model: LearnedCostModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    planner = Planner(Fixed(PLAN), model if make_model is None else make_model())
    planner.plan(TASK)
    said = [text for text in caplog.messages if "reuse_histogram" in text]
    assert len(said) == 1
    assert said[0].startswith("1 of 2 tables have no reuse_histogram")
    caplog.clear()
    planner.plan(with_profiles(TASK))
    assert "reuse_histogram" not in caplog.text


def fail(cost: PlanCost) -> PlanCost:
    raise KeyError("t7")


BROKEN: dict[str, tuple[Callable[[PlanCost], object], str]] = {
    "fails": (fail, "the cost model Broken failed on a plan of 2 tables .*: KeyError: 't7'"),
    "nan": (
        lambda cost: cost.with_stages({STAGES[0]: [math.nan] * len(cost.per_rank)}),
        "the cost model Broken predicts nan ms for rank 0",
    ),
    "too_few_ranks": (
        lambda cost: dataclasses.replace(cost, per_rank=cost.per_rank[1:]),
        "the cost model Broken predicted the costs of 1 ranks, not of 2",
    ),
    "no_cost": (
        lambda cost: cost.cost_ms,
        "the cost model Broken returned .*, which is not a PlanCost",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_cost_model_is_named_in_one_message(name: str) -> None:
    spoil, message = BROKEN[name]

    class Broken(Flat):
        def predict(self, plan: ShardingPlan, task: ShardingTask) -> PlanCost:
            return spoil(super().predict(plan, task))  # type: ignore[return-value]

    with pytest.raises(ConfigError, match=message):
        Planner(Fixed(PLAN), Broken()).plan(TASK)


@pytest.mark.parametrize("returned", [None, {}, (PLAN, 1.0)], ids=["nothing", "dict", "pair"])
def test_a_sharder_that_returns_no_plan(returned: object) -> None:
    with pytest.raises(ConfigError, match=r"Fixed\.shard returned .*not a ShardingPlan"):
        Planner(Fixed(returned), None).plan(TASK)


def test_plans_are_validated() -> None:
    with pytest.raises(InvalidPlanError, match="'unprofiled' is in no shard"):
        Planner(Fixed(ShardingPlan(2, PLAN.shards[:1])), None).plan(TASK)
    with pytest.raises(InfeasibleTaskError):
        Planner(GreedySharder("dim"), None).plan(with_memory(TASK, 100))


class Choosing(Fixed):
    """States the precision of exchanges."""

    exchange_precision = FP32_EXCHANGE


def test_plans_have_the_precision_of_the_run(model: LearnedCostModel) -> None:
    """Unless the plan has one, or the sharder states fp32."""
    run, fp16 = ExchangePrecision("bf16", "bf16"), ExchangePrecision("fp16", "fp32")
    rounded = dataclasses.replace(PLAN, exchange_precision=fp16)
    for sharder, expected in (
        (Fixed(PLAN), run),
        (Fixed(rounded), fp16),
        (Choosing(PLAN), FP32_EXCHANGE),
        (Choosing(rounded), fp16),
    ):
        planner = Planner(sharder, model, exchange_precision=run)
        plan, report = planner.plan(TASK)
        assert plan.exchange_precision == report.exchange_precision == expected
        assert planner.adopt(sharder.shard(TASK), TASK, solve_s=1.0)[0] == plan
        assert report.cost == model.predict(plan, model.cost_task(TASK).task)
        fields = plan_json(plan, report)
        assert ("exchange_precision" in fields) == (expected != FP32_EXCHANGE)
        text = f" with exchanges in {expected}"
        is_named = expected != FP32_EXCHANGE
        assert (text in str(forecast(report))) == is_named
        assert (text in explain(plan, report, TASK, None)) == is_named
