"""Plans of the least predicted step: against all plans there are, and those of the least cost."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded import validate
from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.cluster import Cluster
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.search.find_plan import find_state
from dlrm_sharded.search.smooth_objective import SmoothObjective
from dlrm_sharded.search.state_shards import state_shards
from dlrm_sharded.search.stopping import Clock, StoppingRule
from dlrm_sharded.sharders.base import SharderContext
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.sharders.search import SearchSharder, search_sharder
from dlrm_sharded.step.objective import StepObjective
from dlrm_sharded.step.parts import NO_DENSE
from dlrm_sharded.step.schedule import PIPELINED, SERIAL, Overlap
from tests.unit.search.made_up import all_plans, model_of, predicted, problem_of, tiny_task

ALONE = {"split_error": 0.0, "time_budget_s": None}


def cluster_of(priced: PricedTask, *, hidden_ms: float, overlap: Overlap = PIPELINED) -> Cluster:
    """Ranks whose bottom layers hide so much of each exchange."""
    dense = dataclasses.replace(
        NO_DENSE, bottom_forward_ms=hidden_ms, bottom_backward_ms=hidden_ms, top_forward_ms=0.1
    )
    return Cluster.of_equal_ranks(
        priced.task, dense, priced=priced, dense_error=0.0, overlap=overlap, seed=0
    )


def sharder_of(name: str, objective: str, **cluster: Any) -> SearchSharder:
    step_model = functools.partial(cluster_of, **cluster)
    context = SharderContext(cost_model=model_of(name), step_model=step_model)
    return search_sharder(context, objective=objective, **ALONE)


def planned(task: ShardingTask, name: str, objective: str, **cluster: Any) -> PlanCost:
    plan = sharder_of(name, objective, **cluster).shard(task)
    validate(plan, task)
    return predicted(plan.shards, task, model_of(name))


def computation_ms(cost: PlanCost) -> float:
    return max(rank.computation_ms for rank in cost.per_rank)


def exchange_ms(cost: PlanCost) -> float:
    return max(rank.exchange_ms for rank in cost.per_rank)


@pytest.mark.parametrize("name", ["plain", "links"])
@pytest.mark.parametrize(
    ("overlap", "hidden"),
    [(SERIAL, 0.0), (PIPELINED, 0.5), (PIPELINED, 20.0)],
    ids=["serial", "partly_hidden", "all_hidden"],
)
def test_against_every_plan_of_a_tiny_task(name: str, overlap: Overlap, hidden: float) -> None:
    """No plan's part of the step is shorter by more than a per cent.

    Layers hide `hidden` times the exchanges of the plan that has least of them.
    """
    for seed in (1, 3):
        task = tiny_task(seed, num_tables=4, hosts=(1, 2))
        costs = costs_of_all_plans(task, name)
        hidden_ms = hidden * min(exchange_ms(cost) for cost in costs if exchange_ms(cost)) / 2
        value = functools.partial(decided_ms, overlap=overlap, hidden_ms=hidden_ms)
        found = planned(task, name, "step", hidden_ms=hidden_ms, overlap=overlap)
        assert value(found) <= 1.01 * min(map(value, costs))


@functools.cache
def costs_of_all_plans(task: ShardingTask, name: str) -> list[PlanCost]:
    return [predicted(shards, task, model_of(name)) for shards in all_plans(task)]


def decided_ms(cost: PlanCost, overlap: Overlap, hidden_ms: float) -> float:
    """Return the part of a step that the plan decides, by hand."""
    exposed_ms = sum(
        max(0.0, cost.stage_max_ms(stage) - hidden_ms) for stage in ("fwd_comm", "bwd_comm")
    )
    if not overlap.exchanges:
        return cost.stage_max_ms("fwd_compute") + cost.stage_max_ms("bwd_compute") + exposed_ms
    return computation_ms(cost) + exposed_ms


def planted() -> ShardingTask:
    """A task on which exchanges cost much, and the fewer there are, the more do ranks compute."""
    return tiny_task(3, num_tables=4, hosts=(1, 2), full=0.3)


def test_hidden_exchanges_buy_less_computation() -> None:
    """Where layers hide all exchanges, a plan with more of them and less computation is faster."""
    of_cost, of_step = (
        planned(planted(), "links", objective, hidden_ms=1000.0) for objective in ("cost", "step")
    )
    assert exchange_ms(of_step) > 2.0 * exchange_ms(of_cost)
    assert computation_ms(of_step) < 0.95 * computation_ms(of_cost)
    assert of_step.cost_ms > 1.05 * of_cost.cost_ms


@pytest.mark.parametrize(("seed", "hidden_ms"), [*itertools.product(range(3), (0.0, 0.05))])
def test_no_step_is_longer_than_that_of_the_least_cost(seed: int, hidden_ms: float) -> None:
    task = tiny_task(seed, num_tables=6)
    cluster = cluster_of(model_of("plain").price(task), hidden_ms=hidden_ms)
    steps = [
        cluster.device_ms(planned(task, "plain", objective, hidden_ms=hidden_ms))
        for objective in ("step", "cost")
    ]
    assert steps[0] <= steps[1] * (1 + 1e-6)


def test_where_the_host_is_slower_the_cost_decides() -> None:
    task = planted()
    topology = dataclasses.replace(task.topology, compute_device="cuda")
    task = dataclasses.replace(task, topology=topology)

    def cluster(priced: PricedTask, launch_ms: float) -> Cluster:
        found = cluster_of(priced, hidden_ms=100.0)
        [times, *_] = found.dense.by_rank
        times = dataclasses.replace(times, launch_ms=launch_ms)
        part = dataclasses.replace(found.dense, by_rank=(times,) * 2)
        return dataclasses.replace(found, dense=part)

    plans = {}
    for launch_ms in (0.0, 1000.0):
        step_model = functools.partial(cluster, launch_ms=launch_ms)
        context = SharderContext(cost_model=model_of("links"), step_model=step_model)
        for objective in ("cost", "step"):
            sharder = search_sharder(context, objective=objective, **ALONE)
            plans[launch_ms, objective] = sharder.shard(task)
    assert plans[1000.0, "step"] == plans[1000.0, "cost"] == plans[0.0, "cost"]
    assert plans[0.0, "step"] != plans[0.0, "cost"]  # nothing waits for the host


def test_the_same_plan_again() -> None:
    task = tiny_task(3, num_tables=6)
    plans = {sharder_of("plain", "step", hidden_ms=0.1).shard(task) for _ in range(2)}
    assert len(plans) == 1


def test_near_an_earlier_plan(tmp_path: Path) -> None:
    """A warm start is improved by the step, too."""
    task, model = tiny_task(2, num_tables=5, hosts=(1, 3), full=0.3), model_of("links")
    plan, report = Planner(sharder_of("links", "cost", hidden_ms=1000.0), model).plan(task)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_json(plan, report)))
    sharder = sharder_of("links", "step", hidden_ms=1000.0)
    limits = dataclasses.replace(sharder.constraints, warm_start=str(path))
    near = dataclasses.replace(sharder, constraints=limits).shard(task)
    before, after = (predicted(found.shards, task, model) for found in (plan, near))
    assert computation_ms(after) < 0.99 * computation_ms(before)


@pytest.mark.parametrize("joins", [True, False], ids=["joined", "apart"])
def test_the_value_of_a_state_is_that_of_its_plan(joins: bool) -> None:
    task, model = tiny_task(1, num_tables=6, hosts=(1, 2)), model_of("sparse")
    step = StepObjective((0.02, 0.03), joins_computation=joins)
    state = find_state(
        problem_of(task, model, step=step), 0.0, 0, StoppingRule(3, 0.0, Clock(math.inf))
    )
    assert state is not None
    cost = predicted(state_shards(state), task, model)
    compute_ms = cost.stage_max_ms("fwd_compute") + cost.stage_max_ms("bwd_compute")
    compute_ms = computation_ms(cost) if joins else compute_ms
    expected_ms = compute_ms + step.exposed_ms(exchange_ms(cost))
    assert state.objective_ms == pytest.approx(expected_ms, rel=1e-3)
    smooth = SmoothObjective(state)
    assert expected_ms <= smooth.value_ms < 1.1 * expected_ms


def test_objective_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match=r"sharder\.objective is 'foo'; known: cost, step"):
        search_sharder(SharderContext(cost_model=model_of("plain")), objective="foo")


def test_step_needs_a_step_model() -> None:
    with pytest.raises(ConfigError, match="nothing is known of the steps here; leave it out"):
        search_sharder(SharderContext(cost_model=model_of("plain")), objective="step")
