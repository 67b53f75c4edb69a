"""Policies on other hardware than that of their training, which read the run's costs."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from dlrm_sharded import RunContext, SharderContext, ShardingTask
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.rl.learned_policy import METHODS
from dlrm_sharded.rl.nets import sums_by_rank
from dlrm_sharded.rl.rank_costs import RankCosts
from dlrm_sharded.rl.task_tensors import TaskTensors
from dlrm_sharded.sharders.policy import PolicySharder, policy_sharder
from tests.unit.hardware.synthetic import CPU
from tests.unit.rl.cases import cost_model, random_net, small_pool

HERE = RunContext("cpu", Hardware("cpu: x", Fingerprint(CPU)), "rowwise_adagrad", 4)
each_method = pytest.mark.parametrize("method", METHODS)


def planted() -> LearnedCostModel:
    """Return hardware on which rows beyond the caches are slow, so wide hot tables are cheap."""
    model = cost_model()
    factors = np.ones(model.compute.num_parts)
    for i, term in enumerate(model.compute.device.terms):
        if term.startswith(("id_lines_of_rows_beyond", "unique")):
            factors[i] = 8.0
    return dataclasses.replace(model, compute=model.compute.scaled(factors, factors))


@functools.cache
def tasks(world_size: int = 4) -> list[ShardingTask]:
    pool = small_pool(24, world_size, num=80, full=(0.3, 0.6))
    rng = np.random.default_rng(5)
    return [pool.task(pool.draw(rng)) for _ in range(6)]


def sharder(
    method: str,
    model: LearnedCostModel | None,
    run: RunContext = HERE,
    seed: int = 0,
    prices: str = "auto",
) -> PolicySharder:
    return policy_sharder(SharderContext(run, model), method=method, seed=seed, prices=prices)


def mean_ms(model: LearnedCostModel, sharder: PolicySharder) -> float:
    return float(np.mean([model.predict(sharder.shard(task), task).cost_ms for task in tasks()]))


@each_method
def test_other_hardware_changes_placements_for_the_better(method: str) -> None:
    model = planted()
    as_published = sharder(method, model, prices="never")
    assert mean_ms(model, sharder(method, model)) < 0.99 * mean_ms(model, as_published)
    net = random_net(method)
    own = TaskTensors.from_tasks(tasks()[:1])
    costed = dataclasses.replace(own, costs=rank_costs(tasks()[0]))
    orders = [net.scale_and_sort(tensors)[1].tolist() for tensors in (own, costed)]
    assert orders[0] != orders[1], "tables are sorted by their costs"


@each_method
def test_never_places_as_published(method: str) -> None:
    model, task = planted(), tasks()[0]
    as_published = policy_sharder(SharderContext(), method=method)
    never = sharder(method, model, prices="never")
    assert never.shard(task) == as_published.shard(task)
    # neither do runs on the policy's hardware, and plans without any, read costs
    assert sharder(method, model, RunContext()).shard(task) == as_published.shard(task)
    assert sharder(method, None).shard(task) == as_published.shard(task)
    always = sharder(method, model, RunContext(), prices="always")
    assert always.shard(task) == sharder(method, model).shard(task)


def rank_costs(task: ShardingTask) -> RankCosts:
    return RankCosts.from_task(planted().cost_task(task))


def test_costs_of_ranks_are_those_of_the_model() -> None:
    """Computation but for launches; of exchanges what differs between placements."""
    model, [task] = planted(), tasks(2)[:1]
    of_task = rank_costs(task)
    compute: ComputeModel = model.compute
    exchanges, expected = [], []
    for seed in range(3):
        ranks = torch.tensor(np.random.default_rng(seed).integers(2, size=(1, 24)))
        sums = sums_by_rank(of_task.vectors, ranks, 2)
        costs = of_task.rank_costs(sums, sums.amax(dim=1, keepdim=True))[0].numpy()
        plan = ShardingPlan.from_ranks(task, ranks[0].tolist())
        predicted = model.predict(plan, task)
        num_lookups = workload_of_plan(plan, task).num_lookups()
        for rank, launch_ms in enumerate(compute.launch_ms(num_lookups)):
            stages = predicted.per_rank[rank]
            assert costs[rank, 0] == pytest.approx(stages.fwd_compute_ms - launch_ms[0], rel=1e-4)
            assert costs[rank, 2] == pytest.approx(stages.bwd_compute_ms - launch_ms[1], rel=1e-4)
        exchanges.append(costs[:, 1])
        expected.append([rank.exchange_ms for rank in predicted.per_rank])
    found, expected = np.array(exchanges), np.array(expected)
    np.testing.assert_allclose(found - found.mean(), expected - expected.mean(), rtol=0.1)


def test_costs_stay_with_their_tables() -> None:
    task = tasks()[0]
    tensors = dataclasses.replace(TaskTensors.from_tasks([task]), costs=rank_costs(task))
    order = torch.arange(24).flip(0)[None]
    turned = tensors.repeat(2).reorder(order.expand(2, -1))
    assert turned.costs is not None
    expected = rank_costs(task).vectors.flip(1).expand(2, -1, -1)
    assert torch.equal(turned.costs.vectors, expected)
    in_unit = rank_costs(task).with_mean(torch.tensor([3.0]))
    alone = in_unit.rank_costs(in_unit.vectors, in_unit.vectors).sum(-1)
    assert alone.mean().item() == pytest.approx(3.0, rel=1e-5)


@each_method
def test_a_policy_reads_costs_of_the_size_of_its_own(method: str) -> None:
    """So a plan is the same at any speed of the hardware."""
    net, own = random_net(method), TaskTensors.from_tasks(tasks()[:1])
    costs = dataclasses.replace(rank_costs(tasks()[0]), unit_ms=torch.tensor([1e-3]).double())
    costed = net.scale_and_sort(dataclasses.replace(own, costs=costs))[0]
    mean = net.table_costs(net.scaler(own)).mean()
    torch.testing.assert_close(net.table_costs(costed).mean(), mean)
