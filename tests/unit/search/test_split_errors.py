"""By how much pieces are priced higher, as the gain of a split may be an error of the prices."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded import Constraints, SharderContext, ShardingTask
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.cost.communication import UNMEASURED
from dlrm_sharded.cost.compute import ComputeModel, PriceNet
from dlrm_sharded.cost.features import CPU_WORK, PROFILE
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.shapes import Shapes
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.search import split_errors
from dlrm_sharded.search.split_errors import LEAST_ERROR, UNKNOWN_ERROR, SplitErrors
from dlrm_sharded.sharders.search import SearchSharder
from tests.unit.made_up import task_of
from tests.unit.search.made_up import model_of, roomy_task

TASK = with_profiles(roomy_task(np.random.default_rng(0), (1, 4), 6))


def with_covariance(model: LearnedCostModel, covariance: np.ndarray) -> LearnedCostModel:
    compute = dataclasses.replace(model.compute, uncertainty=np.stack([covariance] * 2))
    return dataclasses.replace(model, compute=compute)


def uncertain(model: LearnedCostModel, spread: float) -> LearnedCostModel:
    """The model with factors of parts that are off by so much, each by itself."""
    return with_covariance(model, spread**2 * np.eye(model.compute.num_parts))


def errors_of(model: LearnedCostModel, task: ShardingTask = TASK) -> SplitErrors:
    priced = model.price(task)
    return SplitErrors.of_prices(priced, Shapes.from_task(priced.task, priced.compute))


def arrays_of(errors: SplitErrors) -> list[np.ndarray]:
    return [errors.columns, *errors.row_blocks, errors.replicas]


def test_prices_that_say_nothing_have_one_share() -> None:
    errors = errors_of(model_of("plain"))
    whole = Shapes.from_task(TASK, model_of("plain").compute).whole
    assert not errors.columns[whole].any()
    partial = np.delete(errors.columns, whole, axis=0)
    assert {*partial.flat, *errors.row_blocks[0].flat, *errors.replicas.flat} == {UNKNOWN_ERROR}


@pytest.mark.parametrize("name", ["plain", "overflowing", "warps"])
def test_common_errors_cancel(name: str) -> None:
    """However wrong all times may be together, the better plan stays the better one."""
    model = model_of(name)
    alone = errors_of(uncertain(model, 0.2))
    num_parts = model.compute.num_parts
    common = with_covariance(model, 0.04 * np.eye(num_parts) + 4.0)
    faster = dataclasses.replace(
        uncertain(model, 0.2), compute=uncertain(model, 0.2).compute.scaled(0.5, 0.5)
    )
    for other in (errors_of(common), errors_of(faster)):
        for ours, theirs in zip(arrays_of(alone), arrays_of(other), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert max(array.max() for array in arrays_of(alone)) > 2 * LEAST_ERROR


def test_shares_grow_with_the_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_errors, "LEAST_ERROR", 0.0)
    little, much = (errors_of(uncertain(model_of("plain"), spread)) for spread in (0.01, 0.1))
    for ours, theirs in zip(arrays_of(little), arrays_of(much), strict=True):
        np.testing.assert_allclose(10.0 * ours, theirs, rtol=1e-6)


def only_price(**ms_by_term: float) -> PriceNet:
    """Constant prices of these terms, and nothing for the others or for launches."""
    ms = np.array([ms_by_term.get(term, 1e-300) for term in CPU_WORK.terms])
    weights = (np.zeros((len(PROFILE), len(ms))),)
    no_caches = np.zeros((len(ms), 0)), np.zeros(0), np.zeros(0)
    return PriceNet(weights, (np.log(ms),), *no_caches, launch_ms=0.0, next_launch_ms=0.0)


def simple_model(**ms_by_term: float) -> LearnedCostModel:
    zeros, ones = np.zeros(len(PROFILE)), np.ones(len(PROFILE))
    net = only_price(**ms_by_term)
    return LearnedCostModel(
        ComputeModel(zeros, ones, zeros, ones, net, net),
        UNMEASURED,
        name="simple",
        device="cpu",
        ranges={},
        measured_links=(),
    )


@pytest.mark.parametrize(("spread", "is_split"), [(0.3, False), (0.01, True)])
def test_a_split_is_made_by_those_who_are_sure_of_its_gain(spread: float, is_split: bool) -> None:
    """Two tables on two ranks, of 19.8 and 14.8 ms: a split evens them out and repeats ids.

    An eighth of the first one takes 2.2 ms, and 2.2 ms for its ids: the second rank then has 19.2.
    """
    tables = [
        Table(name, num_embeddings=1000, embedding_dim=32, pooling_factor=ids)
        for name, ids in (("a", 11.0), ("b", 8.2))
    ]
    task = with_profiles(task_of(tables, batch_size=1000))
    model = uncertain(simple_model(ids=0.1, id_columns=0.4), spread)
    plain = simple_model(ids=0.1, id_columns=0.4)
    plans = {}
    for error, prices in ((None, model), (0.0, plain), (0.5, plain)):
        context = SharderContext(cost_model=prices)
        constraints = Constraints(replicate="never", rows="never")
        plans[error] = SearchSharder(context, constraints, split_error=error).shard(task)
    costs = {error: plain.price(task).predict(plan).cost_ms for error, plan in plans.items()}
    gain = 1 - costs[0.0] / costs[0.5]
    assert gain == pytest.approx(0.032, abs=0.001)
    assert (len(plans[None].shards) > len(tables)) == is_split
    assert costs[None] == pytest.approx(costs[0.0] if is_split else costs[0.5])
