"""Small pools of tasks, networks with made-up weights, and short trainings."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dlrm_sharded.context import RunContext
from dlrm_sharded.cost.learned import LearnedCostModel, learned_cost_model
from dlrm_sharded.plan import whole_tables
from dlrm_sharded.plan_cost import PlanCost
from dlrm_sharded.rl.autoshard import AutoShardTraining
from dlrm_sharded.rl.dreamshard import DreamShardTraining
from dlrm_sharded.rl.inputs import Inputs
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.rl.policy import METHODS
from dlrm_sharded.rl.tasks import TableSet, TaskPool
from dlrm_sharded.rl.training import Schedule, new_method, train
from dlrm_sharded.tables import Table
from dlrm_sharded.task import ShardingTask

BATCH_SIZE = 4096

SHORT: dict[str, Callable[[], Any]] = {
    "autoshard": functools.partial(
        AutoShardTraining,
        cost_updates=3,
        cost_batch=4,
        rollouts=2,
        tasks_per_rollout=2,
        episodes_per_task=2,
    ),
    "dreamshard": functools.partial(
        DreamShardTraining,
        cost_updates=3,
        cost_batch=4,
        policy_updates=2,
        tasks_per_update=2,
        episodes_per_task=2,
    ),
}
"""Trainings that learn next to nothing."""

LONGER: dict[str, Callable[[], Any]] = {
    "autoshard": functools.partial(AutoShardTraining, cost_updates=150, rollouts=20),
    "dreamshard": functools.partial(DreamShardTraining, cost_updates=150, policy_updates=20),
}
"""Trainings that learn to balance two ranks in a few seconds."""


def random_tables(num: int, seed: int = 0) -> TableSet:
    """Of all sizes, with the reuse histograms that cost models assume."""
    rng = np.random.default_rng(seed)
    tables = tuple(
        Table(
            f"t{i}",
            num_embeddings=int(10 ** rng.uniform(3, 6)),
            embedding_dim=int(4 * 2 ** rng.integers(5)),
            pooling_factor=float(10 ** rng.uniform(0, 1.7)),
        )
        for i in range(num)
    )
    return TableSet.profiled(tables, BATCH_SIZE)


def pool_of(
    num_tables: int = 6,
    world_size: int = 2,
    *,
    num: int = 20,
    full: tuple[float, float] = (0.5, 0.8),
    seed: int = 0,
) -> TaskPool:
    return TaskPool((random_tables(num, seed),), num_tables, world_size, full)


@functools.cache
def cost_model() -> LearnedCostModel:
    """That of the package."""
    return learned_cost_model(RunContext())


def predicted(task: ShardingTask, ranks: Sequence[int]) -> PlanCost:
    """In place of a measurement."""
    return cost_model().predict(whole_tables(task, ranks), task)


def random_net(kind: str, seed: int = 0) -> PlacementNet:
    """Weights of no training, none of them zero, and the scaler of `pool_of()`."""
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = METHODS[kind]()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
    net.scaler.fit(*pool_of().described)
    return net.requires_grad_(False)


def drawn_inputs(pool: TaskPool, num: int, seed: int = 0) -> Inputs:
    """Tasks of the pool, as they are before a net scales and orders them."""
    rng = np.random.default_rng(seed)
    return pool.inputs([pool.draw(rng) for _ in range(num)])


@functools.cache
def trained(kind: str) -> PlacementNet:
    """A policy for eight tables on two ranks, after a few seconds of training."""
    method = new_method(LONGER[kind], seed=0)
    schedule = Schedule(num_rounds=5, plans_per_round=20)
    train(method, pool_of(8, num=60, full=(0.3, 0.7)), predicted, schedule)
    return method.net
