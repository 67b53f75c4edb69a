"""Trained policies, and how they are stored in artifacts and loaded from them.

Letters: A orders, E episodes, T tables.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.trial import trial_plans
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.artifact import (
    Arrays,
    Artifact,
    built_from,
    caveats_of,
    find_artifact,
    load_artifact,
    read_artifact,
)
from dlrm_sharded.hardware.artifact_kinds import policy_kind
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.autoshard import AutoShard
from dlrm_sharded.rl.dreamshard import DreamShard
from dlrm_sharded.rl.env import roll_out
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.rl.prices import TablePrices
from dlrm_sharded.rl.task_tensors import FEATURE_NAMES, WORK_NAMES, TaskTensors

log = logging.getLogger(__name__)

PriceTask = Callable[[ShardingTask], PricedTask]

PRICES = AUTO, ALWAYS, NEVER = "auto", "always", "never"
"""When a policy reads the run's prices, see `load_policy`."""

MAX_SAMPLED_RANKS = 512
"""Limit on samples times ranks, so that a plan on many ranks takes seconds."""

METHODS: dict[str, type[PlacementNet]] = {net.kind: net for net in (AutoShard, DreamShard)}
POLICY_FEATURES = {"table": list(FEATURE_NAMES), "work": list(WORK_NAMES)}
"""Inputs of the networks; an artifact whose networks have other inputs is refused."""


@dataclass(frozen=True, slots=True)
class _RollOuts:
    """Placements of one task.

    Args:
        episodes: the task, scaled and sorted, once for each placement.
        order: [T], the number within the task of each sorted table.
        ranks: [E, T], of the sorted tables.
        overflown: [E].
    """

    episodes: TaskTensors
    order: Tensor
    ranks: Tensor
    overflown: Tensor

    def placement(self, i: int) -> tuple[int, ...]:
        """Return the rank of each table, in the order of the task."""
        ranks = torch.empty_like(self.ranks[i]).scatter(0, self.order, self.ranks[i])
        return tuple(ranks.tolist())


class LearnedPolicy:
    """Places tables by trained networks; implements `base.Policy`.

    Args:
        price: gives a task prices, which the policy reads in place of the costs that its cost
            network predicts; None for the network.
    """

    def __init__(self, net: PlacementNet, price: PriceTask | None = None) -> None:
        self._net = net
        self._price = price

    @property
    def reads_prices(self) -> bool:
        """Tell whether placements depend on the run's prices."""
        return self._price is not None

    @torch.no_grad()
    def place(self, task: ShardingTask, *, num_samples: int, seed: int) -> tuple[int, ...] | None:
        """Place the tables in descending order of cost or, if they do not fit so, largest first."""
        found = self._roll_outs(task, num_samples, seed)
        if found.overflown.all():
            return None
        costs = self._net.plan_costs(found.episodes, found.ranks)
        return found.placement(int(costs.masked_fill(found.overflown, torch.inf).argmin()))

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

    def _roll_outs(self, task: ShardingTask, num_samples: int, seed: int) -> _RollOuts:
        """Place tables in descending order of cost or, if all of these overflow, largest first."""
        tensors = TaskTensors.from_tasks([task])
        if self._price is not None:
            prices = TablePrices.from_task(self._price(task))
            tensors = dataclasses.replace(tensors, prices=prices)
        tasks, order = self._net.scale_and_sort(tensors)
        num_samples = min(num_samples, MAX_SAMPLED_RANKS // tasks.world_size)
        found = self._sampled(tasks, order[0], num_samples, seed)
        if not found.overflown.all():
            return found
        return self._reordered(tasks, order[0], _largest_first_orders(tasks.size_bytes[0]))

    def _sampled(self, task: TaskTensors, order: Tensor, num_samples: int, seed: int) -> _RollOuts:
        """Return the most probable placement and some drawn ones."""
        episodes = task.repeat(1 + num_samples)
        greedy = torch.arange(1 + num_samples) == 0
        generator = torch.Generator().manual_seed(seed)
        placed = roll_out(episodes, self._net.actor(episodes), generator, greedy=greedy)
        return _RollOuts(episodes, order, placed.ranks, placed.overflown)

    def _reordered(self, task: TaskTensors, order: Tensor, orders: Tensor) -> _RollOuts:
        """Return the most probable placements in the orders [A, T]."""
        episodes = task.repeat(len(orders))
        in_order = episodes.reorder(orders)
        greedy = torch.ones(len(orders), dtype=torch.bool)
        generator = torch.Generator().manual_seed(0)
        placed = roll_out(in_order, self._net.actor(in_order), generator, greedy=greedy)
        ranks = torch.empty_like(orders).scatter(1, orders, placed.ranks)
        return _RollOuts(episodes, order, ranks, placed.overflown)


def load_policy(
    method: str,
    artifact: str | None,
    context: RunContext,
    *,
    price: PriceTask | None = None,
    prices: str = AUTO,
) -> LearnedPolicy:
    """Load the policy of a run's hardware, or one of other hardware.

    Such a policy reads the run's prices. Without prices, there is a warning.

    Args:
        method: one of `METHODS`.
        artifact: file of a trained policy; None to look for the one of the hardware.
        price: prices tasks for the run; None if the run has no such prices.
        prices: one of `PRICES`, whether the policy reads the run's prices: "auto" if it was trained
            on another device or other hardware, or for another optimizer.

    Raises:
        ConfigError: there is no such method, or no such choice.
        DataError: the file is missing or damaged, or there is none.
    """
    if method not in METHODS:
        raise ConfigError(f"sharder.method is {method!r}; known: {', '.join(METHODS)}")
    if prices not in PRICES:
        raise ConfigError(f"sharder.prices is {prices!r}; known: {', '.join(PRICES)}")
    may_read = price is not None and prices != NEVER
    kind = policy_kind(method)
    loaded = load_artifact(artifact, kind, POLICY_FEATURES, context, warns=not may_read)
    if not may_read or (prices == AUTO and not any(caveats_of(loaded, kind, context))):
        return LearnedPolicy(_net_of(loaded, method))
    log.info(
        "policy: %s, of %s; it reads the run's prices in place of the costs that it predicts",
        loaded.path.name,
        loaded.meta["hardware"],
    )
    return LearnedPolicy(_net_of(loaded, method), price)


def packaged_net(method: str, context: RunContext) -> PlacementNet:
    """Return the networks of the packaged policy that fits a run's hardware best.

    Raises:
        DataError: the package has no sound policy of this method.
    """
    kind = policy_kind(method)
    path = find_artifact(kind, context.hardware, context.device)
    return read_net(method, path)


def read_net(method: str, path: Path) -> PlacementNet:
    """Return the networks of a policy from any hardware.

    Raises:
        DataError: the file is missing, damaged, or of another method.
    """
    return _net_of(read_artifact(path, kind=policy_kind(method), features=POLICY_FEATURES), method)


def _net_of(loaded: Artifact, method: str) -> PlacementNet:
    with torch.random.fork_rng(devices=[]):
        net = METHODS[method]()
    with built_from(loaded, policy_kind(method)):
        net.load_state_dict({key: torch.from_numpy(array) for key, array in loaded.arrays.items()})
        LearnedPolicy(net).check_trial_plan()
    return net


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
