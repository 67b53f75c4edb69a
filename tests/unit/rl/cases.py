"""Small pools of tasks, networks with synthetic weights, and short trainings."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from dlrm_sharded import PlanCost, RunContext, ShardingTask, Table
from dlrm_sharded.calibration.priors import learned_cost_model
from dlrm_sharded.commands.yamls import CONF_DIR
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.rl.learned_policy import METHODS
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.rl.task_tensors import TaskTensors
from dlrm_sharded.rl.tasks import TableSet, TaskPool
from dlrm_sharded.rl.training import PolicyTraining, RoundSchedule, TrainingMethod

BATCH_SIZE = 4096
SHORT = {"cost_updates": 3, "cost_batch": 4, "episodes_per_task": 2}
NUM_BATCHES = {"autoshard": "rollouts", "dreamshard": "policy_updates"}
TASKS_OF_BATCH = {"autoshard": "tasks_per_rollout", "dreamshard": "tasks_per_update"}

NUM_ROUNDS = {"autoshard": 3, "dreamshard": 4}
"""Rounds of the training of `trained` after which plans cost about 2 % more than the best ones."""


def method_of(kind: str, **changes: Any) -> TrainingMethod[Any]:
    """Build a method from its yaml, with some other hyperparameters."""
    return instantiate(OmegaConf.load(CONF_DIR / "policy" / f"{kind}.yaml"), **changes)


def short_method(kind: str) -> TrainingMethod[Any]:
    """Build a method that learns next to nothing."""
    return method_of(kind, **SHORT, **{NUM_BATCHES[kind]: 2, TASKS_OF_BATCH[kind]: 2})


def yaml_pool(**changes: Any) -> TaskPool:
    """Build the pool of `dlrm-train-policy`, with some other keys of `tasks`."""
    return instantiate(OmegaConf.load(CONF_DIR / "train_policy.yaml").tasks, **changes)


def random_tables(num: int, seed: int = 0) -> TableSet:
    """Draw tables of all sizes, with the reuse histograms that cost models assume."""
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
    return TableSet.from_tables(tables, BATCH_SIZE)


def small_pool(
    num_tables: int = 6,
    world_size: int = 2,
    *,
    num: int = 20,
    full: tuple[float, float] = (0.5, 0.8),
    seed: int = 0,
) -> TaskPool:
    return TaskPool((random_tables(num, seed),), num_tables, world_size, full, 0.75, 0.0)


@functools.cache
def cost_model() -> LearnedCostModel:
    """Load the packaged cost model."""
    return learned_cost_model(RunContext())


def predicted(task: ShardingTask, ranks: Sequence[int]) -> PlanCost:
    """Predict what a training would measure."""
    return cost_model().predict(ShardingPlan.from_ranks(task, ranks), task)


def random_net(kind: str, seed: int = 0) -> PlacementNet:
    """Build a net with random weights, none of them zero, and the scaler of `small_pool()`."""
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = METHODS[kind]()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
    net.scaler.fit(*small_pool().table_tensors)
    return net.requires_grad_(False)


def drawn_inputs(pool: TaskPool, num: int, seed: int = 0) -> TaskTensors:
    """Draw tasks of the pool, before a net scales and sorts them."""
    rng = np.random.default_rng(seed)
    return pool.tensors([pool.draw(rng) for _ in range(num)])


@functools.cache
def trained(kind: str) -> PlacementNet:
    """Train a policy for eight tables on two ranks on predicted costs."""
    method = method_of(kind, cost_updates=150, **{NUM_BATCHES[kind]: 20})
    schedule = RoundSchedule(num_rounds=NUM_ROUNDS[kind], plans_per_round=20, seed=0)
    training = PolicyTraining(method, small_pool(8, num=60, full=(0.3, 0.7)), schedule)
    training.run(predicted)
    return training.net
