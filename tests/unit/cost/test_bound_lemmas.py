"""Lemmas up to L12 of docs/notes/lower_bound.md, on random plans and cost models.

Letters: W ranks, S shards.
"""

import dataclasses
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded.cost import bound
from dlrm_sharded.cost.bound import Relaxation, lower_bound_ms
from dlrm_sharded.cost.communication import EXCHANGES, STEP_EXCHANGES, CommunicationModel
from dlrm_sharded.cost.exchange_costs import ExchangeCosts, LeastExchangeCosts
from dlrm_sharded.cost.exchange_terms import EXCHANGE_TERMS, REDUCE_TERMS, Hosts
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.shapes import Shapes
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.tables import Table
from tests.unit.cost.bound_lemmas import (
    TOLERANCE,
    Floats,
    at_least,
    every_rank_ms_of,
    kind_of,
    models,
)
from tests.unit.cost.plans import Planned, planned, tables, topologies
from tests.unit.cost.worked_bound import LAUNCH_MS, worked_model, worked_task
from tests.unit.search.synthetic import all_plans, predicted
from tests.unit.synthetic import USED_ONCE, column_shards, task_of


@st.composite
def communication_models(draw: st.DrawFn) -> CommunicationModel:
    """Weights of any terms, from all of them to a single one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0.05, 0.2, 1.0]))
    shapes = [(len(EXCHANGES), len(terms)) for terms in (EXCHANGE_TERMS, REDUCE_TERMS)]
    weights = [rng.exponential(1.0, shape) * (rng.random(shape) < density) for shape in shapes]
    return CommunicationModel(*weights)


@st.composite
def hosts_and_volumes(draw: st.DrawFn) -> tuple[Hosts, Floats]:
    """Volumes [W] from even to all on one rank."""
    topology = draw(topologies())
    size = topology.world_size
    links = draw(st.tuples(*[st.floats(0.01, 10.0)] * 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    share = rng.dirichlet(np.full(size, draw(st.sampled_from([0.01, 0.3, 3.0, 1000.0]))))
    return Hosts(size, topology.ranks_per_host, *links), share * 10 ** draw(st.floats(3, 8))


def step_exchange_ms(model: CommunicationModel, volume: Floats, hosts: Hosts) -> Floats:
    """[W], both exchanges of volumes [W], with one shard on every rank."""
    shards = np.ones((1, len(volume)))
    times = [model.all_to_all_ms(kind, volume[None], shards, hosts)[0] for kind in STEP_EXCHANGES]
    return np.sum(times, axis=0)


def launch_ms(model: LearnedCostModel) -> float:
    return float(model.compute.launch_ms(np.ones(1)).sum())


def by_rank_ms(cost: PlanCost) -> Floats:
    return np.array([rank.total_ms for rank in cost.per_rank])


@given(of=hosts_and_volumes(), model=communication_models())
def test_l3_even_volumes_are_cheapest_in_the_mean(
    of: tuple[Hosts, Floats], model: CommunicationModel
) -> None:
    hosts, volume = of
    even = np.full_like(volume, volume.mean())
    even_ms = step_exchange_ms(model, even, hosts).mean()
    assert at_least(step_exchange_ms(model, volume, hosts).mean(), even_ms)
    costs = ExchangeCosts.from_model(model, hosts)
    linear_ms = (
        costs.fixed_ms + costs.even_byte_ms * volume.mean() + costs.shard_ms * hosts.world_size
    )
    assert even_ms == pytest.approx(linear_ms, rel=1e-6)


@given(of=planned(), model=models, factor=st.floats(1.0, 4.0))
def test_l5_a_limit_that_a_plan_keeps_never_raises_the_mean_above_it(
    of: Planned, model: LearnedCostModel, factor: float
) -> None:
    relaxation = Relaxation(model.cost_task(of[1]))
    kind = kind_of(of, relaxation)
    cost_ms = predicted(of[0].shards, of[1], model).cost_ms * (1 + TOLERANCE)
    mean_ms = relaxation.mean_ms(cost_ms, kind)
    assert at_least(cost_ms, mean_ms)
    assert at_least(mean_ms, relaxation.mean_ms(factor * cost_ms, kind))


@given(of=hosts_and_volumes(), model=communication_models())
def test_l7_every_rank_pays_the_least_exchange_costs(
    of: tuple[Hosts, Floats], model: CommunicationModel
) -> None:
    hosts, volume = of
    costs = LeastExchangeCosts.from_model(model, hosts)
    assert costs.own_byte_ms >= 0.0
    fixed_ms = ExchangeCosts.from_model(model, hosts).fixed_ms
    least_ms = fixed_ms + costs.own_byte_ms * volume + costs.any_byte_ms * volume.sum()
    least_ms += costs.busiest_byte_ms * (volume.max() - volume.mean())
    assert at_least(step_exchange_ms(model, volume, hosts), least_ms)


@given(of=planned(), model=models, factor=st.floats(1.0, 2.0))
def test_l11_no_plan_excludes_the_range_of_what_its_ranks_pay(
    of: Planned, model: LearnedCostModel, factor: float
) -> None:
    plan, task = of
    relaxation = Relaxation(model.cost_task(task))
    kind = kind_of(of, relaxation)
    every_rank_ms = kind.every_rank_fixed_ms + float(every_rank_ms_of(kind, of).sum())
    by_rank = by_rank_ms(predicted(plan.shards, task, model))
    least_launch_ms = launch_ms(model) if kind.num_on_all_ranks else 0.0
    assert at_least(by_rank, every_rank_ms + least_launch_ms)
    assert at_least(every_rank_ms, kind.least_ms)
    limit_ms = by_rank.max() * factor * (1 + TOLERANCE)
    low, high = every_rank_ms * (1 - TOLERANCE) / factor, every_rank_ms * (1 + TOLERANCE) * factor
    assert not relaxation.excludes(limit_ms, kind, low, high)
    assert not relaxation.exceeds(limit_ms, kind)


@given(
    of=planned(layouts=("rows_of_host", "rows_of_host", "whole", "columns", "replicas")),
    model=models,
    factor=st.floats(1.0, 1.2),
)
def test_l12_the_largest_row_blocks_of_a_host_separate_plans(
    of: Planned, model: LearnedCostModel, factor: float
) -> None:
    with mock.patch.object(bound, "LOADED_SHARE", 0.0):
        relaxation = Relaxation(model.cost_task(of[1]))
        kind = kind_of(of, relaxation)
    limit_ms = factor * predicted(of[0].shards, of[1], model).cost_ms * (1 + TOLERANCE)
    assert not relaxation.exceeds(limit_ms, kind)


def test_l12_is_sharp_where_two_hosts_do_the_same() -> None:
    """Row blocks of `a` on one host, and columns of `b` on the other one, all of them even."""
    a, b = Table("a", 1000, 8, 10.0, USED_ONCE), Table("b", 1000, 8, 101 / 15, USED_ONCE)
    task = task_of((a, b), 4, 2**30, 1000, local_world_size=2)
    exchange, reduce = (
        np.zeros((len(EXCHANGES), len(terms))) for terms in (EXCHANGE_TERMS, REDUCE_TERMS)
    )
    exchange[0, EXCHANGE_TERMS.index("max_busier_inter")] = 100.0
    reduce[0, REDUCE_TERMS.index("one")] = 0.01
    model = dataclasses.replace(worked_model(), communication=CommunicationModel(exchange, reduce))
    shards = (*RowBlocks(range(2)).shards(a), *column_shards(b, (2, 4), (3, 4)))
    relaxation = Relaxation(model.cost_task(task))
    kind = kind_of((ShardingPlan(4, shards), task), relaxation)
    assert kind.loaded == 0
    cost_ms = predicted(shards, task, model).cost_ms
    assert cost_ms == pytest.approx(LAUNCH_MS + 1.01 + 100.0 * 2 * 0.004)
    assert relaxation.bound_of_kind_ms(kind) == pytest.approx(cost_ms, rel=1e-5)
    assert at_least(cost_ms, relaxation.bound_of_kind_ms(kind))


@given(table=tables("t"), model=models)
def test_all_widths_are_in_the_catalog(table: Table, model: LearnedCostModel) -> None:
    """L4 takes a minimum over the widths that plans may have: all multiples of 4 columns."""
    task = dataclasses.replace(worked_task(), tables=(table,))
    assert Shapes.from_task(task, model.compute).step.tolist() == [4]


def test_worked_example() -> None:
    """The numbers of docs/notes/lower_bound.md."""
    task, model = worked_task(), worked_model()
    costs = LeastExchangeCosts.from_model(model.communication, model.cost_task(task).hosts)
    assert (costs.own_byte_ms, costs.any_byte_ms) == pytest.approx((0.0, 5e-6))
    relaxation = Relaxation(model.cost_task(task))
    kinds = relaxation.kinds()
    means = {2.3: 3.8290, 2.5: 2.7969, 3.0: 2.4567}
    for limit_ms, mean_ms in means.items():
        assert relaxation.mean_ms(limit_ms, kinds[0]) == pytest.approx(mean_ms, abs=1e-4)
    by_kind = [relaxation.bound_of_kind_ms(kind) for kind in kinds]
    assert by_kind == pytest.approx([2.79, 2.95, 2.95, 3.33, 3.33, 3.95, 4.4804], rel=1e-5)
    assert lower_bound_ms(model.cost_task(task)) == by_kind[0]
    costs = [predicted(shards, task, model).cost_ms for shards in all_plans(task)]
    assert min(costs) == pytest.approx(2.89)
