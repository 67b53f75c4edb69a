"""Trained policies, and how they are stored in artifacts and loaded from them.

Letters: A orders, E episodes, T tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_sharded.artifact import Arrays, built_from, load_artifact, policy_kind
from dlrm_sharded.context import RunContext
from dlrm_sharded.cost.trial import trial_plans
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.rl.autoshard import AutoShard
from dlrm_sharded.rl.dreamshard import DreamShard
from dlrm_sharded.rl.env import roll_out
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.rl.task_tensors import FEATURE_NAMES, WORK_NAMES, TaskTensors
from dlrm_sharded.task import ShardingTask

MAX_SAMPLED_RANKS = 512
"""Limit on samples times ranks, so that a plan on many ranks takes seconds."""

METHODS: dict[str, type[PlacementNet]] = {net.kind: net for net in (AutoShard, DreamShard)}
POLICY_FEATURES = {"table": list(FEATURE_NAMES), "work": list(WORK_NAMES)}
"""Inputs of the networks; an artifact whose networks have other inputs is refused."""


class LearnedPolicy:
    """Places tables by trained networks; implements `base.Policy`."""

    def __init__(self, net: PlacementNet) -> None:
        self._net = net

    @torch.no_grad()
    def place(self, task: ShardingTask, *, num_samples: int, seed: int) -> tuple[int, ...] | None:
        """Place the tables in descending order of cost or, if they do not fit so, largest first."""
        tasks, order = self._net.scale_and_sort(TaskTensors.from_tasks([task]))
        max_samples = MAX_SAMPLED_RANKS // tasks.world_size
        placement = self._best_sample(tasks, min(num_samples, max_samples), seed)
        if placement is None:
            placement = self._best_order(tasks, _largest_first_orders(tasks.size_bytes[0]))
        if placement is None:
            return None
        ranks = torch.empty_like(placement).scatter(0, order[0], placement)
        return tuple(ranks.tolist())

    def check_trial_plan(self) -> None:
        """Raise an error if the networks do not place a few tables, or price them at no number."""
        task, (plan, _) = trial_plans(world_size=2)
        self.place(task, num_samples=2, seed=0)
        tensors = TaskTensors.from_tasks([task])
        ranks = torch.tensor([[shard.rank for shard in plan.shards]])
        with torch.no_grad():
            cost = self._net.plan_costs(self._net.scaler(tensors), ranks)
        if not cost.isfinite().all():
            raise ValueError(f"it prices a plan at {cost.item()}")

    def _best_sample(self, task: TaskTensors, num_samples: int, seed: int) -> Tensor | None:
        """Return the cheapest of the most probable placement and of some drawn ones, [T]."""
        episodes = task.repeat(1 + num_samples)
        greedy = torch.arange(1 + num_samples) == 0
        generator = torch.Generator().manual_seed(seed)
        placed = roll_out(episodes, self._net.actor(episodes), generator, greedy=greedy)
        return self._cheapest(episodes, placed.ranks, placed.overflown)

    def _best_order(self, task: TaskTensors, orders: Tensor) -> Tensor | None:
        """Return the cheapest of the most probable placements in the orders [A, T], as [T]."""
        episodes = task.repeat(len(orders))
        in_order = episodes.reorder(orders)
        greedy = torch.ones(len(orders), dtype=torch.bool)
        generator = torch.Generator().manual_seed(0)
        placed = roll_out(in_order, self._net.actor(in_order), generator, greedy=greedy)
        ranks = torch.empty_like(orders).scatter(1, orders, placed.ranks)
        return self._cheapest(episodes, ranks, placed.overflown)

    def _cheapest(self, episodes: TaskTensors, ranks: Tensor, overflown: Tensor) -> Tensor | None:
        """Return the placement [T] with the lowest predicted cost, None if all overflow."""
        if overflown.all():
            return None
        costs = self._net.plan_costs(episodes, ranks)
        return ranks[costs.masked_fill(overflown, torch.inf).argmin()]


def load_policy(method: str, artifact: str | None, context: RunContext) -> LearnedPolicy:
    """Load the policy of a run's hardware, or with a warning one of other hardware.

    Args:
        method: one of `METHODS`.
        artifact: file of a trained policy; None to look for the one of the hardware.

    Raises:
        ConfigError: there is no such method.
        DataError: the file is missing or damaged, or there is none.
    """
    if method not in METHODS:
        raise ConfigError(f"sharder.method is {method!r}; known: {', '.join(METHODS)}")
    kind = policy_kind(method)
    loaded = load_artifact(artifact, kind, POLICY_FEATURES, context)
    with torch.random.fork_rng(devices=[]):
        net = METHODS[method]()
    with built_from(loaded, kind):
        net.load_state_dict({key: torch.from_numpy(array) for key, array in loaded.arrays.items()})
        policy = LearnedPolicy(net)
        policy.check_trial_plan()
    return policy


def to_arrays(net: PlacementNet) -> Arrays:
    """Return what the safetensors file of an artifact holds."""
    return {key: value.numpy() for key, value in net.state_dict().items()}


def _largest_first_orders(size_bytes: Tensor) -> Tensor:
    """Return orders [A, T] in which the 1, 2, 4, ... largest tables come before all others."""
    num_tables = len(size_bytes)
    by_size = size_bytes.argsort(descending=True, stable=True)
    orders = []
    num_first = 1
    while num_first < 2 * num_tables:
        first = by_size[:num_first]
        is_other = torch.ones(num_tables, dtype=torch.bool)
        is_other[first] = False
        orders.append(torch.cat([first, is_other.nonzero()[:, 0]]))
        num_first *= 2
    return torch.stack(orders)
