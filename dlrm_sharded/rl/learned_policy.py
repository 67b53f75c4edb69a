"""Trained policies, and how they are stored in artifacts and loaded from them.

Letters: A orders, T tables.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
from torch import Tensor

from dlrm_sharded.cost.base import WithCosts
from dlrm_sharded.files.errors import check_choice
from dlrm_sharded.hardware.artifact import (
    Arrays,
    Artifact,
    built_from,
    caveats_of,
    load_artifact,
    read_artifact,
)
from dlrm_sharded.hardware.artifact_kinds import policy_kind
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.autoshard import AutoShard
from dlrm_sharded.rl.dreamshard import DreamShard
from dlrm_sharded.rl.env import Placements, roll_out
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.rl.rank_costs import RankCosts
from dlrm_sharded.rl.task_tensors import FEATURE_NAMES, WORK_NAMES, TaskTensors

log = logging.getLogger(__name__)

WITH_COSTS = AUTO, ALWAYS, NEVER = "auto", "always", "never"
"""When a policy reads the costs of the run's cost model, see `load_policy`."""

MAX_SAMPLED_RANKS = 512
"""Limit on samples times ranks, so that a plan on many ranks takes seconds."""


METHODS: dict[str, type[PlacementNet]] = {net.kind: net for net in (AutoShard, DreamShard)}
POLICY_FEATURES = {"table": list(FEATURE_NAMES), "work": list(WORK_NAMES)}
"""Inputs of the networks; an artifact whose networks have other inputs is refused."""


class LearnedPolicy:
    """Places tables by trained networks; implements `base.Policy`.

    Args:
        with_costs: gives a task the costs of the run's cost model, which the policy reads in place
            of those that its cost network predicts; None for the network.
    """

    def __init__(self, net: PlacementNet, with_costs: WithCosts | None = None) -> None:
        self._net = net
        self._with_costs = with_costs

    @property
    def reads_costs(self) -> bool:
        """Return whether placements depend on the costs of the run's cost model."""
        return self._with_costs is not None

    @torch.no_grad()
    def place(self, task: ShardingTask, *, num_samples: int, seed: int) -> tuple[int, ...] | None:
        """Place the tables in descending order of cost; if they do not fit, the largest first."""
        tensors = TaskTensors.from_tasks([task])
        if self._with_costs is not None:
            costs = RankCosts.from_task(self._with_costs(task))
            tensors = dataclasses.replace(tensors, costs=costs)
        tensors, order = self._net.scale_and_sort(tensors)
        num_episodes = 1 + min(num_samples, MAX_SAMPLED_RANKS // tensors.world_size)
        episodes = tensors.repeat(num_episodes)
        # the most probable placement, and some drawn ones
        placed = self._roll_out(episodes, torch.arange(num_episodes) == 0, seed)
        ranks = placed.ranks
        if placed.overflown.all():
            orders = _largest_first_orders(tensors.size_bytes[0])
            episodes = tensors.repeat(len(orders))
            greedy = torch.ones(len(orders), dtype=torch.bool)
            placed = self._roll_out(episodes.reorder(orders), greedy, seed)
            if placed.overflown.all():
                return None
            ranks = torch.empty_like(orders).scatter(1, orders, placed.ranks)
        plan_costs = self._net.plan_costs(episodes, ranks).masked_fill(placed.overflown, torch.inf)
        best = ranks[plan_costs.argmin()]
        return tuple(torch.empty_like(best).scatter(0, order[0], best).tolist())

    def _roll_out(self, episodes: TaskTensors, greedy: Tensor, seed: int) -> Placements:
        generator = torch.Generator().manual_seed(seed)
        return roll_out(episodes, self._net.actor(episodes), generator, greedy=greedy)


def load_policy(
    method: str,
    artifact: str | None,
    context: RunContext,
    *,
    with_costs: WithCosts | None = None,
    reads_costs: str = AUTO,
) -> LearnedPolicy:
    """Load the policy of a run's hardware, or one of other hardware.

    By default, a policy of other hardware reads the costs of the run's cost model. If it has none
    that a policy can read, there is a warning.

    Args:
        method: one of `METHODS`.
        artifact: file of a trained policy; None to look for the one of the hardware.
        with_costs: gives a task the run's costs; None if the run has none that a policy can read.
        reads_costs: one of `WITH_COSTS`, the value of `sharder.prices`; with "auto", the policy
            reads costs if it was trained on another device or other hardware, or for another
            optimizer.

    Raises:
        ConfigError: there is no such method, or no such choice.
        DataError: the file is missing or damaged, or there is none.
    """
    check_choice("sharder.method", method, METHODS)
    check_choice("sharder.prices", reads_costs, WITH_COSTS)
    if reads_costs == NEVER:
        with_costs = None
    kind = policy_kind(method)
    loaded = load_artifact(artifact, kind, POLICY_FEATURES, context, warns=with_costs is None)
    if reads_costs == AUTO and not any(caveats_of(loaded, kind, context)):
        with_costs = None
    if with_costs is not None:
        log.info(
            "policy: %s, of %s; it reads the costs of the run's cost model in place of its own",
            loaded.path.name,
            loaded.meta["hardware"],
        )
    return LearnedPolicy(_net_of(loaded, method), with_costs)


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
    return net


def to_arrays(net: PlacementNet) -> Arrays:
    """Return what the safetensors file of an artifact holds."""
    return {key: value.numpy() for key, value in net.state_dict().items()}


def _largest_first_orders(size_bytes: Tensor) -> Tensor:
    """Return orders [A, T] in which the 1, 2, 4, ... largest tables come before all others."""
    by_size = size_bytes.argsort(descending=True, stable=True)
    orders, num_first = [], 1
    while num_first < 2 * len(by_size):
        orders.append(torch.cat([by_size[:num_first], by_size[num_first:].sort().values]))
        num_first *= 2
    return torch.stack(orders)
