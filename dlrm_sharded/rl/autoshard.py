"""AutoShard (arXiv:2208.06399): a network for the cost of many tables, and an actor-critic.

The cost network predicts what the tables of a rank cost together (sec. 3.2). An LSTM reads the
tables in the order in which they are placed. A rank is described by the sum of its tables' vectors,
its predicted cost and its memory; its score is computed from the LSTM's state, the rank's
description and their product (sec. 3.3). IMPALA's V-trace corrects for episodes that were played by
an earlier policy.

Differences from the paper and its code, each because of a fault there:
- Costs include communication.
- Ranks without enough memory are masked; the policy does not have to learn to avoid them.
- Episodes are played in batches in one process; there are no actor processes that can hang.
- The reward is the cost of the slowest rank; the paper's balance of ranks can be chosen instead.
- A rank's description is relative to the cost of the table to be placed, so that it means the same
  on any task.

Letters: E episodes, T tables, W ranks, K numbers of a table, H numbers of a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dlrm_sharded.files.errors import check_choice
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.rl.env import Actor, Placements, mean_entropy, replayed_log_probs
from dlrm_sharded.rl.nets import (
    VECTOR_SIZE,
    CostHead,
    PlacementNet,
    TableNet,
    mlp,
    one_hot,
    sums_before_each_step,
    sums_by_rank,
)
from dlrm_sharded.rl.task_tensors import FEATURE_NAMES, TaskTensors
from dlrm_sharded.rl.training import TrainingMethod

STATE_SIZE = 64
SCORE_LAYERS = (128, 128, 64)

RANK_FEATURES = ("cost_with_table", "below_slowest_rank", "memory_left")
"""Inputs of the policy about a rank besides its sums: the predicted cost if the table is placed
there, how much less the rank costs now than the slowest one, and the share of memory left."""

REWARDS = ("cost", "balance")
BASELINE_WEIGHT = 0.5
"""Weight of the critic's squared error in the loss."""


class AutoShardCostNet(nn.Module):
    """Predicts what a rank's tables cost together (sec. 3.2), in units of `PlacementNet.ms`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TableNet()
        self.head = CostHead(2 * VECTOR_SIZE)

    def forward(self, sums: Tensor, largest: Tensor) -> Tensor:
        """Return the costs [...] of ranks with sums [..., K].

        Args:
            largest: [..., K], the largest sums of all ranks; an exchange waits for that rank.
        """
        return self.head(torch.cat([sums, largest.expand_as(sums)], dim=-1))


class ActorCritic(nn.Module):
    """Predicts scores of ranks and the reward that is still to come (sec. 3.3)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(len(FEATURE_NAMES) + 2, STATE_SIZE, num_layers=2, batch_first=True)
        self.rank = mlp([VECTOR_SIZE + len(RANK_FEATURES), STATE_SIZE])
        self.score = mlp([3 * STATE_SIZE, *SCORE_LAYERS, 1])
        self.value = mlp([3 * STATE_SIZE, STATE_SIZE, 1])

    def states(self, tasks: TaskTensors, table_costs: Tensor) -> Tensor:
        """Return [E, T, H] from the tables' features, costs, and costs placed before each step."""
        share = table_costs / table_costs.sum(dim=1, keepdim=True)
        placed = share.cumsum(dim=1) - share
        sequence = torch.cat([tasks.features, share[..., None], placed[..., None]], dim=-1)
        return self.lstm(sequence)[0]

    def forward(self, states: Tensor, sums: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores [..., W] and values [...].

        Args:
            states: [..., H].
            sums: [..., W, K], each rank's sums if it takes the table, in costs of the table.
            features: [..., W, 3], `RANK_FEATURES`.
        """
        ranks = self.rank(torch.cat([torch.log1p(sums), features], dim=-1))
        state = states[..., None, :].expand_as(ranks)
        scores = self.score(torch.cat([state, ranks, state * ranks], dim=-1))[..., 0]
        all_ranks = torch.cat([states, ranks.mean(dim=-2), ranks.amax(dim=-2)], dim=-1)
        return scores, self.value(all_ranks)[..., 0]


class AutoShard(PlacementNet):
    """AutoShard's cost network and its policy."""

    kind = "autoshard"

    def __init__(self) -> None:
        super().__init__()
        self.cost = AutoShardCostNet()
        self.policy = ActorCritic()

    def table_costs(self, tasks: TaskTensors) -> Tensor:
        vectors = self.vectors(tasks)
        return self.rank_costs(tasks, vectors, vectors)

    def plan_costs(self, tasks: TaskTensors, ranks: Tensor) -> Tensor:
        sums = sums_by_rank(self.vectors(tasks), ranks, tasks.world_size)
        return self.rank_costs(tasks, sums, sums.amax(dim=1, keepdim=True)).amax(dim=1)

    def vectors(self, tasks: TaskTensors) -> Tensor:
        """Return [E, T, K], vectors of the cost network and, behind them, of the tasks' costs."""
        vectors = self.cost.table(tasks)
        return vectors if tasks.costs is None else torch.cat([vectors, tasks.costs.vectors], -1)

    def rank_costs(self, tasks: TaskTensors, sums: Tensor, largest: Tensor) -> Tensor:
        """Return the costs [E, ...] of ranks with sums [E, ..., K] of `vectors`."""
        if tasks.costs is None:
            return self.cost(sums, largest)
        sums, largest = sums[..., VECTOR_SIZE:], largest[..., VECTOR_SIZE:]
        return tasks.costs.rank_costs(sums, largest).sum(dim=-1)

    def actor(self, tasks: TaskTensors) -> AutoShardActor:
        return AutoShardActor(self, tasks)

    def describe_ranks(
        self, tasks: TaskTensors, before: Tensor, vectors: Tensor, table_costs: Tensor, free: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sums and the `RANK_FEATURES` of all ranks, as `ActorCritic` reads them.

        Args:
            before: [..., W, K], sums before the table is placed.
            vectors, table_costs: [..., K] and [...], vector and cost of the table.
            free: [..., W], bytes left on each rank if it takes the table.
        """
        largest = before.amax(dim=-2, keepdim=True)
        sums = before + vectors[..., None, :]
        unit = table_costs[..., None]
        costs_before = self.rank_costs(tasks, before, largest)
        costs = self.rank_costs(tasks, sums, torch.maximum(largest, sums))
        # an empty rank must never count as the slowest one, even if the network predicts that
        used = before.amax(dim=-1) > 0
        slowest = costs_before.masked_fill(~used, -torch.inf).amax(dim=-1, keepdim=True)
        capacity = tasks.capacity.view(len(tasks.capacity), *[1] * (free.dim() - 2), -1)
        relative = [
            torch.log1p((cost / unit).clamp(min=0.0)) for cost in (costs, slowest - costs_before)
        ]
        features = torch.stack([*relative, free / capacity], dim=-1)
        return sums[..., :VECTOR_SIZE].float() / unit[..., None], features

    @torch.no_grad()
    def history(self, tasks: TaskTensors, placed: Placements) -> EpisodeHistory:
        """Recompute what an actor read as it placed the tables."""
        size, vectors = tasks.world_size, self.vectors(tasks)
        before = sums_before_each_step(vectors, placed.ranks, size)
        table_costs = self.positive_table_costs(tasks)
        free = placed.free - tasks.size_bytes[..., None]
        sums, features = self.describe_ranks(tasks, before, vectors, table_costs, free)
        after = before + one_hot(placed.ranks, size)[..., None] * vectors[:, :, None]
        costs = self.rank_costs(tasks, after, after.amax(dim=2, keepdim=True))
        return EpisodeHistory(table_costs, sums, features, costs)


@dataclass(frozen=True, slots=True)
class EpisodeHistory:
    """All steps of finished episodes.

    Args:
        table_costs: [E, T].
        sums, features: [E, T, W, ...], before each step, see `AutoShard.describe_ranks`.
        costs: [E, T, W], predicted cost of each rank after each step.
    """

    table_costs: Tensor
    sums: Tensor
    features: Tensor
    costs: Tensor


class AutoShardActor(Actor):
    """Sums up vectors of the cost network step by step, and knows all tables from the start."""

    def __init__(self, net: AutoShard, tasks: TaskTensors) -> None:
        super().__init__(tasks, net.vectors(tasks))
        self._net, self._table_costs = net, net.positive_table_costs(tasks)
        self._states = net.policy.states(tasks, self._table_costs)

    def scores(self, step: int, free: Tensor) -> Tensor:
        [sums], [vectors] = self._sums, self._vectors
        free = free - self._tasks.size_bytes[:, step, None]
        inputs = self._net.describe_ranks(
            self._tasks, sums, vectors[:, step], self._table_costs[:, step], free
        )
        return self._net.policy(self._states[:, step], *inputs)[0]


def step_rewards(reward: str, costs: Tensor, table_costs: Tensor, overflown: Tensor) -> Tensor:
    """Return [E, T], the change of the episode's score in each step; their sum is the final score.

    The score `cost` is minus the cost of the slowest rank, divided by a cost below which no
    placement can be: the mean of the ranks or the most expensive table, whichever is larger. The
    score `balance`, the paper's, is the smallest cost of a rank divided by the largest.

    Args:
        reward: one of `REWARDS`.
        costs: [E, T, W], costs of the ranks after each step.
        table_costs: [E, T].
        overflown: [E], see `Placements`; the last step of such an episode loses 1.
    """
    slowest = costs.amax(dim=2)
    if reward == "balance":
        scores = costs.amin(dim=2) / slowest.clamp(min=1e-9)
    else:
        mean = table_costs.sum(dim=1) / costs.shape[2]
        scores = -slowest / torch.maximum(mean, table_costs.amax(dim=1))[:, None]
    rewards = torch.diff(scores, dim=1, prepend=torch.zeros_like(scores[:, :1]))
    rewards[:, -1] -= overflown.float()
    return rewards


def v_trace(log_rhos: Tensor, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value targets and the advantages of the actions, both [E, T].

    Espeholt et al. (arXiv:1802.01561), eq. 1 and sec. 4.2, without discount and with weights cut
    at 1. The value after the last step of an episode is 0.

    Args:
        log_rhos: [E, T], log of the actions' present probabilities over those of when they were
            drawn.
        values: [E, T], predicted values of the states before each step.
    """
    rhos = log_rhos.exp().clamp(max=1.0)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    errors = rhos * (rewards + next_values - values)
    corrections = []
    correction = torch.zeros_like(values[:, 0])
    # the recursion of the paper's remark 1: a step's correction includes those of the steps after
    for error, rho in zip(errors.unbind(1)[::-1], rhos.unbind(1)[::-1], strict=True):
        correction = error + rho * correction
        corrections.append(correction)
    targets = values + torch.stack(corrections[::-1], dim=1)
    next_targets = torch.cat([targets[:, 1:], torch.zeros_like(targets[:, :1])], dim=1)
    return targets, rhos * (rewards + next_targets - values)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoShardTraining(TrainingMethod[AutoShard]):
    """Fits the cost network, and updates the actor-critic on V-trace targets.

    Args:
        rollouts: batches of episodes that are played in each round.
        updates_per_rollout: policy updates on each batch of episodes.
        tasks_per_rollout, episodes_per_task: their product is the size of a batch of episodes.
        reward: one of `REWARDS`; "balance" is the paper's.
    """

    net_class: ClassVar[type[PlacementNet]] = AutoShard

    rollouts: int
    updates_per_rollout: int
    tasks_per_rollout: int
    episodes_per_task: int
    reward: str

    def __post_init__(self) -> None:
        TrainingMethod.__post_init__(self)
        check_choice("policy.reward", self.reward, REWARDS)

    @property
    def episodes(self) -> tuple[int, int, int]:
        return self.rollouts, self.tasks_per_rollout, self.episodes_per_task

    def measured_ms(self, costs: Sequence[PlanCost]) -> tuple[Tensor, ...]:
        """Return the costs of all ranks."""
        return (torch.tensor([[rank.total_ms for rank in cost.per_rank] for cost in costs]),)

    def cost_errors(
        self, net: AutoShard, tasks: TaskTensors, ranks: Tensor, measured_ms: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return [E, W], errors of ranks relative to the plan's mean rank."""
        [targets] = measured_ms
        sums = sums_by_rank(net.cost.table(tasks), ranks, tasks.world_size)
        costs = net.ms * net.cost(sums, sums.amax(dim=1, keepdim=True))
        return ((costs - targets) / targets.mean(dim=1, keepdim=True),)

    def policy_losses(
        self, net: AutoShard, tasks: TaskTensors, placed: Placements
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        history = net.history(tasks, placed)
        rewards = step_rewards(self.reward, history.costs, history.table_costs, placed.overflown)
        slowest = history.costs[:, -1].amax(dim=1).mean()
        for _ in range(self.updates_per_rollout):
            states = net.policy.states(tasks, history.table_costs)
            scores, values = net.policy(states, history.sums, history.features)
            log_p = replayed_log_probs(tasks, placed, scores)
            log_p_placed = log_p.gather(2, placed.ranks[..., None])[..., 0]
            with torch.no_grad():
                log_rhos = log_p_placed - placed.log_probs
                targets, advantages = v_trace(log_rhos, rewards, values)
            critic_loss = BASELINE_WEIGHT * (targets - values).square().mean()
            loss = -(advantages * log_p_placed).mean() + critic_loss
            yield loss, mean_entropy(log_p), slowest
