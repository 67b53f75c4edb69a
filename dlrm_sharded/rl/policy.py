"""A trained policy, and how it becomes an artefact and comes back.

Letters: E episodes, T tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_sharded.artifact import Arrays, load_artifact, policy_kind
from dlrm_sharded.context import RunContext
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.rl.autoshard import AutoShard
from dlrm_sharded.rl.dreamshard import DreamShard
from dlrm_sharded.rl.env import Placements, roll_out
from dlrm_sharded.rl.inputs import TABLE_FEATURES, WORK_TERMS, Inputs
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.task import ShardingTask

MOST_RANKS_AT_ONCE = 512
"""Of all placements that are drawn together: so that on many ranks a plan takes seconds."""

METHODS: dict[str, type[PlacementNet]] = {net.kind: net for net in (AutoShard, DreamShard)}
FEATURES = {"table": list(TABLE_FEATURES), "work": list(WORK_TERMS)}


class LearnedPolicy:
    """Places tables by trained networks; see `base.Policy`."""

    def __init__(self, net: PlacementNet) -> None:
        self._net = net

    @torch.no_grad()
    def place(self, task: ShardingTask, *, num_samples: int, seed: int) -> tuple[int, ...] | None:
        """The most probable placement and some drawn ones; else some with large tables first."""
        inputs, order = self._net.ordered(Inputs.of([task]))
        at_once = MOST_RANKS_AT_ONCE // inputs.world_size
        found = self._best(inputs, 1 + min(num_samples, at_once), seed)
        if found is None:
            orders = _largest_first(inputs.size_bytes[0])
            found = self._best_of_orders(inputs, orders)
        if found is None:
            return None
        ranks = torch.empty_like(found).scatter(0, order[0], found)
        return tuple(ranks.tolist())

    def _best(self, inputs: Inputs, num_episodes: int, seed: int) -> Tensor | None:
        episodes = inputs.repeated(num_episodes)
        greedy = torch.arange(num_episodes) == 0
        random = torch.Generator().manual_seed(seed)
        placed = roll_out(episodes, self._net.actor(episodes), random, greedy=greedy)
        return self._cheapest(episodes, placed)

    def _best_of_orders(self, inputs: Inputs, orders: Tensor) -> Tensor | None:
        """[T], in the order of the inputs."""
        episodes = inputs.repeated(len(orders)).in_order(orders)
        greedy = torch.ones(len(orders), dtype=torch.bool)
        random = torch.Generator().manual_seed(0)
        placed = roll_out(episodes, self._net.actor(episodes), random, greedy=greedy)
        ranks = torch.empty_like(orders).scatter(1, orders, placed.ranks)
        return self._cheapest(
            inputs.repeated(len(orders)), Placements(ranks, placed.overflown, placed.log_probs)
        )

    def _cheapest(self, episodes: Inputs, placed: Placements) -> Tensor | None:
        if placed.overflown.all():
            return None
        costs = self._net.plan_costs(episodes, placed.ranks)
        return placed.ranks[costs.masked_fill(placed.overflown, torch.inf).argmin()]


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
    found = load_artifact(artifact, policy_kind(method), FEATURES, context)
    with torch.random.fork_rng(devices=[]):
        net = METHODS[method]()
    net.load_state_dict({key: torch.from_numpy(array) for key, array in found.arrays.items()})
    return LearnedPolicy(net)


def to_arrays(net: PlacementNet) -> Arrays:
    """What the safetensors file of an artefact holds."""
    return {key: value.numpy() for key, value in net.state_dict().items()}


def _largest_first(size_bytes: Tensor) -> Tensor:
    """[A, T], orders that take ever more of the largest tables before the others."""
    num_tables = len(size_bytes)
    by_size = size_bytes.argsort(descending=True, stable=True)
    orders = []
    first = 1
    while first < 2 * num_tables:
        head = by_size[:first]
        rest = torch.ones(num_tables, dtype=torch.bool)
        rest[head] = False
        orders.append(torch.cat([head, rest.nonzero()[:, 0]]))
        first *= 2
    return torch.stack(orders)
