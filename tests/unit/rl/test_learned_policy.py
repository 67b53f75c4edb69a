"""Trained policies: near the best plan of small tasks, whatever the task, and on disk and back."""

import itertools
import operator
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_sharded import ConfigError, RunContext, ShardingTask, Table
from dlrm_sharded.accesses.profiles import with_profiles
from dlrm_sharded.hardware.artifact import write_artifact
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.rl.env import roll_out
from dlrm_sharded.rl.learned_policy import (
    METHODS,
    POLICY_FEATURES,
    LearnedPolicy,
    load_policy,
    to_arrays,
)
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.rl.task_tensors import TaskTensors
from tests.unit.rl.cases import BATCH_SIZE, predicted, random_net, small_pool, trained
from tests.unit.synthetic import task_of

each_kind = pytest.mark.parametrize("kind", METHODS)


def other_tasks(num: int, num_tables: int = 8, world_size: int = 2) -> list[ShardingTask]:
    """Other tasks than those of the training, of its tables."""
    pool = small_pool(num_tables, world_size, num=60, full=(0.3, 0.7))
    rng = np.random.default_rng(1000)
    return [pool.task(pool.draw(rng)) for _ in range(num)]


def estimated(net: PlacementNet, task: ShardingTask, ranks: tuple[int, ...]) -> float:
    inputs = net.scaler(TaskTensors.from_tasks([task]))
    with torch.no_grad():
        return float(net.plan_costs(inputs, torch.tensor([ranks])))


def fits(task: ShardingTask, ranks: Sequence[int]) -> bool:
    used = ShardingPlan.from_ranks(task, ranks).bytes_by_rank(task.topology)
    return all(map(operator.le, used, task.topology.rank_memory_bytes))


@pytest.fixture(scope="module")
def solved() -> list[tuple[ShardingTask, float, float]]:
    """Return tasks with the cost of their best plan and the mean cost of all that fit."""
    found = []
    for task in other_tasks(10):
        plans = [ranks for ranks in itertools.product(range(2), repeat=8) if fits(task, ranks)]
        costs = [predicted(task, ranks).cost_ms for ranks in plans]
        found.append((task, min(costs), float(np.mean(costs))))
    return found


@each_kind
def test_close_to_the_best_plan_on_two_ranks(
    kind: str, solved: list[tuple[ShardingTask, float, float]]
) -> None:
    policy = LearnedPolicy(trained(kind))
    excess, random_excess = [], []
    for task, best, mean in solved:
        ranks = policy.place(task, num_samples=0, seed=0)
        assert fits(task, ranks)
        excess.append(predicted(task, ranks).cost_ms / best - 1)
        random_excess.append(mean / best - 1)
    assert min(excess) >= -1e-9
    assert np.mean(excess) <= 0.05
    assert np.mean(excess) < np.mean(random_excess) / 2


@each_kind
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_samples_never_make_the_predicted_cost_worse(kind: str, weights: str) -> None:
    net = trained(kind) if weights == "trained" else random_net(kind)
    policy = LearnedPolicy(net)
    better = 0
    for task in other_tasks(6, num_tables=12, world_size=3):
        placed = [policy.place(task, num_samples=num, seed=3) for num in (0, 1, 16)]
        first, *others = (estimated(net, task, ranks) for ranks in placed)
        assert max(others) <= first + 1e-4 * abs(first)
        better += others[1] < first - 1e-4 * abs(first)
    assert better > 0, "samples are of no use"


@each_kind
def test_the_seed_decides(kind: str) -> None:
    policy = LearnedPolicy(random_net(kind))
    (task,) = other_tasks(1, num_tables=20, world_size=4)
    before = torch.get_rng_state()
    plans = [policy.place(task, num_samples=8, seed=seed) for seed in (0, 0, 1, 2, 3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert plans[0] == plans[1]
    assert len(set(plans)) > 1


@each_kind
@pytest.mark.parametrize(("num_tables", "world_size"), [(1, 1), (1, 3), (3, 1), (2, 16), (40, 16)])
def test_any_number_of_tables_and_ranks(kind: str, num_tables: int, world_size: int) -> None:
    for task in other_tasks(2, num_tables, world_size):
        ranks = LearnedPolicy(trained(kind)).place(task, num_samples=2, seed=0)
        assert fits(task, ranks)


@each_kind
def test_a_placement_that_overflows_is_never_chosen(kind: str) -> None:
    pool = small_pool(20, 4, num=60, full=(0.93, 0.96))
    rng, policy, num_placed = np.random.default_rng(0), LearnedPolicy(random_net(kind)), 0
    for task in [pool.task(pool.draw(rng)) for _ in range(8)]:
        ranks = policy.place(task, num_samples=16, seed=0)
        assert ranks is None or fits(task, ranks)
        num_placed += ranks is not None
    assert num_placed > 0


def order_matters() -> ShardingTask:
    """A large cheap table, which fits only if all the small costly ones are on the other rank."""
    small = [Table(f"small{i}", 1000, 64, 50.0) for i in range(8)]
    tables = (*small, Table("large", 128_000, 4, 1.0))
    return with_profiles(task_of(tables, 2, 8 * 1000 * 64 * 4, BATCH_SIZE, device="cuda"))


@each_kind
def test_large_tables_come_first_where_they_must(kind: str) -> None:
    task, net = order_matters(), trained(kind)
    inputs, order = net.scale_and_sort(TaskTensors.from_tasks([task]))
    assert int(order[0, -1]) == 8, "the large table is the cheapest"
    greedy = torch.tensor([True])
    placed = roll_out(inputs, net.actor(inputs), torch.Generator(), greedy=greedy)
    assert placed.overflown.all(), "in the order of cost it fits nowhere"
    ranks = LearnedPolicy(net).place(task, num_samples=0, seed=0)
    assert fits(task, ranks)
    assert len(set(ranks[:8])) == 1
    assert ranks[8] != ranks[0]


@each_kind
def test_on_disk_and_back(kind: str, tmp_path: Path) -> None:
    net = trained(kind)
    meta = {
        **{"kind": kind, "hardware": "synthetic", "device": "cpu", "features": POLICY_FEATURES},
        **{"cores": len(os.sched_getaffinity(0)), "optimizer": "rowwise_adagrad"},
    }
    path = write_artifact(tmp_path, "policy", to_arrays(net), meta)
    before = torch.get_rng_state()
    loaded = load_policy(kind, str(path), RunContext("cpu", optimizer="rowwise_adagrad"))
    assert torch.equal(torch.get_rng_state(), before)
    for task in [*other_tasks(4), *other_tasks(2, num_tables=20, world_size=4)]:
        found, again = (p.place(task, num_samples=8, seed=1) for p in (LearnedPolicy(net), loaded))
        assert found == again is not None


def test_an_unknown_method() -> None:
    message = r"sharder.method is 'guessing'; known: autoshard, dreamshard"
    with pytest.raises(ConfigError, match=message):
        load_policy("guessing", None, RunContext())
