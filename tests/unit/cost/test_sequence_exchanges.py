"""Bytes of sequences in exchanges, which count for more or fewer bytes of bags."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded.calibration.factor_fit import fitted_to
from dlrm_sharded.calibration.observed import observed_times
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.communication import (
    EXCHANGES,
    STEP_EXCHANGES,
    CommunicationModel,
    one_byte_each,
)
from dlrm_sharded.cost.exchange_costs import ExchangeCosts, LeastExchangeCosts
from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS, REDUCE_TERMS, Hosts
from dlrm_sharded.cost.workload import Floats, Workload, workload_of_plan
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import BWD_COMM, FWD_COMM
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from tests.unit.cost.hardware import measured_plans
from tests.unit.cost.test_bound_lemmas import at_least, communication_models, hosts_and_volumes
from tests.unit.synthetic import USED_ONCE

PRIOR = learned_cost_model(RunContext("cpu"))
COUNTS = np.array([[0.5, 1.5], [1.25, 2.0]])
OWN_BYTES = np.zeros((len(EXCHANGES), len(EXCHANGE_TERMS)))
OWN_BYTES[:, EXCHANGE_TERMS.index("own_bytes")] = 1.0
MODEL = CommunicationModel(OWN_BYTES, np.zeros((len(EXCHANGES), len(REDUCE_TERMS))))
HOSTS = Hosts(2, 2)


def workload(*, pooled: bool = False, rows: bool = False) -> Workload:
    """A table of 16 columns and 5 ids a sample, whole or in row blocks on two ranks."""
    table = Table("t", 1000, 16, 5.0, USED_ONCE, pooled=pooled)
    task = ShardingTask((table,), Topology(2, memory_bytes=2**40), 1000)
    shards = RowBlocks(range(2)).shards(table) if rows else (Shard.whole(table, 0),)
    return workload_of_plan(ShardingPlan(2, tuple(shards)), task)


def times_ms(model: CommunicationModel, kind: str, of: Workload) -> Floats:
    return model.exchange_ms(kind, model.exchange_of(kind, of), HOSTS)


@pytest.mark.parametrize("kind", EXCHANGES)
def test_bytes_count_by_direction_and_layout(kind: str) -> None:
    model = dataclasses.replace(MODEL, sequences=COUNTS)
    whole, blocks = {FWD_COMM: (0.5, 1.5), BWD_COMM: (1.25, 2.0)}.get(kind, (1.0, 1.0))
    for of, count in (
        (workload(), whole),
        (workload(rows=True), blocks),
        (workload(pooled=True), 1.0),
    ):
        before = times_ms(MODEL, kind, of)
        assert times_ms(model, kind, of) == pytest.approx(before * count)


@given(
    of=hosts_and_volumes(),
    model=communication_models(),
    shares=st.tuples(*[st.integers(0, 2**32)] * 2),
)
def test_l16_no_cost_counts_fewer_bytes_of_sequences(
    of: tuple[Hosts, Floats], model: CommunicationModel, shares: tuple[int, int]
) -> None:
    hosts, volume = of
    rng, size = np.random.default_rng(shares), hosts.world_size
    model = dataclasses.replace(model, sequences=np.exp(rng.normal(size=(2, 2))))
    # of bags, whole sequences and row blocks
    by_class = volume * rng.dirichlet([0.5] * 3, size).T
    step_ms = sum(
        model.all_to_all_ms(
            kind, (np.array([1.0, *counts]) @ by_class)[None], np.ones((1, size)), hosts
        )[0]
        for kind, counts in zip(STEP_EXCHANGES, model.sequences, strict=True)
    )
    even = ExchangeCosts.from_model(model, hosts)
    least = LeastExchangeCosts.from_model(model, hosts)
    counted = np.array([1.0, *least.sequences]) @ by_class
    least_ms = even.fixed_ms + least.own_byte_ms * counted + least.any_byte_ms * counted.sum()
    least_ms += least.busiest_byte_ms * (counted.max() - counted.mean())
    assert at_least(step_ms, least_ms)
    shards_ms = even.shard_ms * size
    assert at_least(
        np.mean(step_ms), even.fixed_ms + shards_ms + even.even_byte_ms * counted.mean()
    )


def test_costs_of_the_step_weigh_both_exchanges() -> None:
    """Both exchanges have the same cost of a byte, so that the mean of their counts holds."""
    model = dataclasses.replace(MODEL, sequences=COUNTS)
    for costs in (ExchangeCosts, LeastExchangeCosts):
        assert costs.from_model(model, HOSTS).sequences == pytest.approx((0.875, 1.75))


def test_exchanges_without_costs_count_the_mean() -> None:
    nothing = dataclasses.replace(MODEL, exchange=np.zeros_like(OWN_BYTES), sequences=COUNTS)
    assert ExchangeCosts.from_model(nothing, HOSTS).sequences == (0.875, 1.75)
    assert LeastExchangeCosts.from_model(nothing, HOSTS).sequences == (1.25, 2.0)


def measured(samples: list[Sample]) -> list[Sample]:
    """Samples whose shards are bags or sequences in turns, measured where `COUNTS` hold."""
    communication = dataclasses.replace(PRIOR.communication, sequences=COUNTS)
    there = dataclasses.replace(PRIOR, communication=communication)
    found = []
    for number, sample in enumerate(samples):
        shards = tuple(
            dataclasses.replace(shard, pooled=bool(number % 2), row_wise=number % 4 == 0)
            for shard in sample.shards
        )
        sample = dataclasses.replace(sample, shards=shards)
        cost = there.predict_workload(workload_of_sample(sample), sample.hosts)
        found.append(dataclasses.replace(sample, cost=cost))
    return found


@pytest.fixture(scope="module")
def plans() -> list[Sample]:
    return measured_plans(0, 24, seed=5)


def test_a_fit_finds_the_counts(plans: list[Sample]) -> None:
    bags = dataclasses.replace(PRIOR.communication, sequences=one_byte_each())
    prior = dataclasses.replace(PRIOR, communication=bags)
    observed = [observed_times(prior, each) for each in measured(plans)]
    adapted = fitted_to(observed).applied(prior)
    assert adapted.communication.sequences == pytest.approx(COUNTS, rel=0.15)
