"""Cheapest plans of small tasks, which no bound may exceed and the search should find."""

import functools
import math

import pytest

from benchmarks.exact import cheapest_ms, small_task
from dlrm_sharded import RunContext, make_sharder
from dlrm_sharded.cost.bound import lower_bound_ms
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model
from tests.unit.search.made_up import MODELS, all_plans, model_of, predicted, tiny_task

SEEDS = (0, 1, 2, 6, 9, 11, 48)
"""Tasks of 1 to 5 tables on 3 and 4 ranks, CPUs and GPUs, that take a second in all. In
the last one, ranks with larger row blocks have no other lookup; the bound once took one for all."""


@functools.cache
def learned(device: str) -> LearnedCostModel:
    return learned_cost_model(RunContext(device=device))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hosts", [(1, 3), (2, 2), (3, 1)])
def test_no_plan_is_cheaper_and_one_costs_as_much(name: str, hosts: tuple[int, int]) -> None:
    for seed in range(2):
        task = tiny_task(seed, num_tables=2, hosts=hosts, full=0.5)
        model = model_of(name, seed)
        priced = model.price(task)
        costs_ms = [predicted(shards, task, model).cost_ms for shards in all_plans(priced.task)]
        assert cheapest_ms(priced) == pytest.approx(min(costs_ms, default=math.inf), rel=1e-9)


def test_a_known_plan_is_enough() -> None:
    priced = model_of("plain").price(tiny_task(0, num_tables=2))
    least_ms = cheapest_ms(priced)
    assert cheapest_ms(priced, 0.9 * least_ms) == 0.9 * least_ms
    assert cheapest_ms(priced, 1.1 * least_ms) == least_ms


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_is_below_and_the_plan_is_near(seed: int) -> None:
    task = small_task(seed)
    model = learned(task.topology.compute_device)
    priced = model.price(task)
    plan = make_sharder("neuroshard", model, time_budget_s=None).shard(priced.task)
    found_ms = priced.predict(plan).cost_ms

    least_ms = cheapest_ms(priced, found_ms)

    assert lower_bound_ms(priced) <= least_ms * (1 + 1e-9)
    assert found_ms <= 1.005 * least_ms
