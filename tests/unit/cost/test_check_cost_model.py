"""`check_cost_model` accepts the package's models, and finds what is wrong with others."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS
from dlrm_sharded.cost.features import CPU_WORK
from dlrm_sharded.cost.published_nets import neuroshard_cost_model
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.testing import check_cost_model, small_tasks
from tests.unit.cost.worked_bound import worked_model, worked_task
from tests.unit.search.synthetic import MODELS, model_of, unlimited_task

TASKS = {**small_tasks(), "2_hosts_of_3": unlimited_task(np.random.default_rng(0), (2, 3), 6)}


@pytest.mark.parametrize("task", TASKS)
def test_calibrated_model(task: str) -> None:
    check_cost_model(model_of("shipped"), TASKS[task])


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_same_form(name: str) -> None:
    check_cost_model(model_of(name), TASKS["2_hosts_of_3"])


def test_published_model_is_checked_for_what_it_can_do() -> None:
    check_cost_model(neuroshard_cost_model(RunContext()), TASKS["w2-mixed"])


def changed_compute(**fields: Any) -> Any:
    model = worked_model()
    forward = dataclasses.replace(model.compute.forward, **fields)
    return dataclasses.replace(model, compute=dataclasses.replace(model.compute, forward=forward))


def changed_exchange(term: str, weight: float) -> Any:
    model = worked_model()
    exchange = model.communication.exchange.copy()
    exchange[0, EXCHANGE_TERMS.index(term)] = weight
    communication = dataclasses.replace(model.communication, exchange=exchange)
    return dataclasses.replace(model, communication=communication)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (changed_compute(launch_ms=float("nan")), "not finite"),
        (changed_compute(launch_ms=-100.0), "a time is negative"),
        (changed_compute(cache_gain=np.full((len(CPU_WORK.terms), 1), -0.1)), "computes faster"),
        (changed_exchange("own_shards", -1e-6), "negative cost"),
    ],
    ids=["not_a_number", "negative_time", "negative_gain", "negative_weight"],
)
def test_finds_models_that_break_an_assumption(model: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_cost_model(model, worked_task())


def test_finds_a_model_that_is_not_deterministic() -> None:
    model, noise = worked_model(), np.random.default_rng(0)

    def predict(plan, task):
        cost = model.predict(plan, task)
        first = dataclasses.replace(cost.per_rank[0], fwd_comm_ms=float(noise.random()))
        return dataclasses.replace(cost, per_rank=(first, *cost.per_rank[1:]))

    with pytest.raises(AssertionError, match="deterministic"):
        check_cost_model(SimpleNamespace(predict=predict), worked_task())
