"""DreamShard (arXiv:2210.02023): a cost network, and a policy trained on the costs it predicts.

The cost network predicts the forward computation, communication and backward computation of a rank
from the sum of its tables' vectors, and the cost of the plan from the largest sums and costs of all
ranks. For every rank the policy reads the costs that are predicted if the rank takes the table, and
sums of its own vectors, and returns a score. Only the data of the cost network is measured on
hardware; the episodes of the policy are rewarded by what the network predicts (sec. 3.2 and 3.3).

Differences from the published code, because of faults there:
- One legality mask serves sampling and training.
- Costs are passed by name.
- Features are scaled over all tables, not within a task.
- No layer depends on the number of ranks.
- Sums are updated step by step for all episodes at once, without a network call per table.
Other differences:
- Communication depends on the largest sums of all ranks too.
- Scores are in units of the cost of the table to be placed, so that they mean the same on any task.
- A step is judged only by the costs that came after it.

Letters: E episodes, T tables, W ranks, K numbers of a table, N measured plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from dlrm_sharded.files.errors import check_count
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.rl.env import Actor, Placements, mean_entropy, replayed_log_probs
from dlrm_sharded.rl.nets import (
    HEAD_SIZE,
    VECTOR_SIZE,
    CostHead,
    PlacementNet,
    TableNet,
    mlp,
    sums_before_each_step,
    sums_by_rank,
)
from dlrm_sharded.rl.task_tensors import TaskTensors
from dlrm_sharded.rl.training import TrainingMethod

RANK_COSTS = ("forward", "communication", "backward")
"""The costs that are predicted for each rank; both exchanges together are one of them."""

COST_LAYERS = (64, 32)
"""Layer sizes of the part of the policy that reads `RANK_COSTS`."""

MIN_RELATIVE_SPREAD = 0.01
"""Added to the spread of a task's episodes, relative to their mean cost, so that negligible
differences do not become large advantages."""

OVERFLOW_PENALTY = 1.0
"""Share of its cost that is added to the cost of a plan that overflows a rank."""


class DreamShardCostNet(nn.Module):
    """Predicts costs of ranks and plans from sums (sec. 3.2), in units of `PlacementNet.ms`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TableNet()
        self.forward_head = CostHead(VECTOR_SIZE)
        self.communication_head = CostHead(2 * VECTOR_SIZE)
        self.backward_head = CostHead(VECTOR_SIZE)
        sizes = [VECTOR_SIZE + len(RANK_COSTS) + 1, HEAD_SIZE, 1]
        self.overall = mlp(sizes, bias=False, starts_at_zero=True)

    def rank_costs(self, sums: Tensor, largest: Tensor) -> Tensor:
        """Return [..., 3], the `RANK_COSTS` of ranks with sums [..., K].

        Args:
            largest: [..., K], the largest sums of all ranks; an exchange waits for that rank.
        """
        both = torch.cat([sums, largest.expand_as(sums)], dim=-1)
        costs = [self.forward_head(sums), self.communication_head(both), self.backward_head(sums)]
        return torch.stack(costs, dim=-1)

    def plan_cost(self, sums: Tensor, rank_costs: Tensor) -> Tensor:
        """Return [...], the cost of the slowest rank plus a learned correction.

        Args:
            sums: [..., W, K].
            rank_costs: [..., W, 3].
        """
        total = rank_costs.sum(dim=-1, keepdim=True)
        largest = torch.cat([sums, rank_costs, total], dim=-1).amax(dim=-2)
        return total.amax(dim=(-2, -1)) + self.overall(largest)[..., 0]


class DreamShardPolicyNet(nn.Module):
    """Computes scores of ranks (sec. 3.3)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TableNet()
        self.costs = mlp([len(RANK_COSTS), *COST_LAYERS], bias=False)
        self.score = nn.Linear(VECTOR_SIZE + COST_LAYERS[-1], 1, bias=False)
        nn.init.zeros_(self.score.weight)  # at first, all legal ranks are equally probable

    def forward(self, sums: Tensor, rank_costs: Tensor, table_cost: Tensor) -> Tensor:
        """Return the scores [...] of ranks.

        Args:
            sums, rank_costs: [..., K] and [..., 3], for the rank if it takes the table.
            table_cost: [...], cost of the table.
        """
        score: Tensor = self.score(torch.cat([sums, self.costs(rank_costs)], dim=-1))[..., 0]
        return score / table_cost


class DreamShard(PlacementNet):
    """DreamShard's cost network and its policy."""

    kind = "dreamshard"

    def __init__(self) -> None:
        super().__init__()
        self.cost = DreamShardCostNet()
        self.policy = DreamShardPolicyNet()

    def table_costs(self, tasks: TaskTensors) -> Tensor:
        vectors = self.cost_vectors(tasks)
        return self._rank_costs(tasks, vectors, vectors).sum(dim=-1)

    def plan_costs(self, tasks: TaskTensors, ranks: Tensor) -> Tensor:
        sums = sums_by_rank(self.cost_vectors(tasks), ranks, tasks.world_size)
        return self._plan_costs(tasks, sums)

    def costs_before_each_step(self, tasks: TaskTensors, ranks: Tensor) -> Tensor:
        """Return [E, T], the cost of what the ranks [E, T] hold before each step."""
        sums = sums_before_each_step(self.cost_vectors(tasks), ranks, tasks.world_size)
        return self._plan_costs(tasks, sums)

    def _plan_costs(self, tasks: TaskTensors, sums: Tensor) -> Tensor:
        """Return the costs [E, ...] of plans with sums [E, ..., W, K]."""
        rank_costs = self._rank_costs(tasks, sums, sums.amax(dim=-2, keepdim=True))
        if tasks.costs is not None:
            return rank_costs.sum(dim=-1).amax(dim=-1)
        return self.cost.plan_cost(sums, rank_costs)

    def costs_with_table(self, tasks: TaskTensors, before: Tensor, vectors: Tensor) -> Tensor:
        """Return [..., W, 3], the `RANK_COSTS` of every rank if it takes a table.

        Args:
            before: [..., W, K], sums before the table is placed.
            vectors: [..., K], vector of the table.
        """
        sums = before + vectors[..., None, :]
        largest = torch.maximum(before.amax(dim=-2, keepdim=True), sums)
        return self._rank_costs(tasks, sums, largest)

    def cost_vectors(self, tasks: TaskTensors) -> Tensor:
        """Return [E, T, K], vectors of the tables whose sums have a cost."""
        return self.cost.table(tasks) if tasks.costs is None else tasks.costs.vectors

    def _rank_costs(self, tasks: TaskTensors, sums: Tensor, largest: Tensor) -> Tensor:
        """Return the `RANK_COSTS` by the costs of the tasks or, if they have none, the network."""
        return (tasks.costs or self.cost).rank_costs(sums, largest)

    def actor(self, tasks: TaskTensors) -> DreamShardActor:
        return DreamShardActor(self, tasks)

    def scores(self, tasks: TaskTensors, ranks: Tensor) -> Tensor:
        """Return [E, T, W], the scores of an actor that placed the tables on the ranks [E, T]."""
        with torch.no_grad():
            vectors = self.cost_vectors(tasks)
            before = sums_before_each_step(vectors, ranks, tasks.world_size)
            rank_costs = self.costs_with_table(tasks, before, vectors)
            table_costs = self.positive_table_costs(tasks)
        vectors = self.policy.table(tasks)
        sums = sums_before_each_step(vectors, ranks, tasks.world_size) + vectors[:, :, None]
        return self.policy(sums, rank_costs, table_costs[..., None])


class DreamShardActor(Actor):
    """Sums up vectors of the cost network and of the policy, step by step."""

    def __init__(self, net: DreamShard, tasks: TaskTensors) -> None:
        super().__init__(tasks, net.cost_vectors(tasks), net.policy.table(tasks))
        self._net, self._table_costs = net, net.positive_table_costs(tasks)

    def scores(self, step: int, free: Tensor) -> Tensor:
        cost_vectors, vectors = self._vectors
        before, sums = self._sums
        rank_costs = self._net.costs_with_table(self._tasks, before, cost_vectors[:, step])
        sums = sums + vectors[:, step, None]
        return self._net.policy(sums, rank_costs, self._table_costs[:, step, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class DreamShardTraining(TrainingMethod[DreamShard]):
    """Fits the cost network, and improves the policy by REINFORCE on the estimated MDP (Alg. 1).

    Args:
        policy_updates: gradient steps of the policy in each round.
        tasks_per_update, episodes_per_task: their product is the number of episodes of one gradient
            step; the mean of a task's episodes is their baseline, so there must be at least two.
    """

    net_class: ClassVar[type[PlacementNet]] = DreamShard

    policy_updates: int
    tasks_per_update: int
    episodes_per_task: int

    def __post_init__(self) -> None:
        TrainingMethod.__post_init__(self)
        check_count("policy.episodes_per_task", self.episodes_per_task, least=2)

    @property
    def episodes(self) -> tuple[int, int, int]:
        return self.policy_updates, self.tasks_per_update, self.episodes_per_task

    def measured_ms(self, costs: Sequence[PlanCost]) -> tuple[Tensor, ...]:
        """Return the costs of all ranks in the order of `RANK_COSTS`, and of the plans."""
        by_rank = [
            [(rank.fwd_compute_ms, rank.exchange_ms, rank.bwd_compute_ms) for rank in cost.per_rank]
            for cost in costs
        ]
        return torch.tensor(by_rank), torch.tensor([cost.cost_ms for cost in costs])

    def cost_errors(
        self, net: DreamShard, tasks: TaskTensors, ranks: Tensor, measured_ms: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return errors of ranks [E, W, 3] and of plans [E].

        All are relative to the plan's mean rank, because they add up over its ranks.
        """
        by_rank, overall = measured_ms
        sums = sums_by_rank(net.cost.table(tasks), ranks, tasks.world_size)
        rank_costs = net.cost.rank_costs(sums, sums.amax(dim=1, keepdim=True))
        scale = by_rank.sum(dim=-1).mean(dim=1)
        rank_errors = (net.ms * rank_costs - by_rank) / scale[:, None, None]
        plan_costs = net.cost.plan_cost(sums, rank_costs)
        return rank_errors, (net.ms * plan_costs - overall) / scale

    def policy_losses(
        self, net: DreamShard, tasks: TaskTensors, placed: Placements
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        with torch.no_grad():
            costs = net.plan_costs(tasks, placed.ranks)
            costs = costs * (1.0 + OVERFLOW_PENALTY * placed.overflown)
            to_come = costs[:, None] - net.costs_before_each_step(tasks, placed.ranks)
            by_task = to_come.view(-1, self.episodes_per_task, tasks.num_tables)
            advantage = advantages(by_task).view_as(to_come)
        log_p = replayed_log_probs(tasks, placed, net.scores(tasks, placed.ranks))
        entropy = mean_entropy(log_p)
        log_p_placed = log_p.gather(2, placed.ranks[..., None])[..., 0]
        yield -(advantage * log_p_placed).mean(), entropy, costs.mean()


def advantages(to_come: Tensor) -> Tensor:
    """Return [G, N, T], the advantage of each step's rank over the task's other episodes.

    The baseline is the mean cost to come over the task's episodes, and the unit is their spread.
    Before the first step nothing is placed, so its cost to come is that of the whole plan.

    Args:
        to_come: [G, N, T], costs to come before each step, for N episodes of each of G tasks.
    """
    mean, spread = to_come.mean(dim=1, keepdim=True), to_come.std(dim=1, keepdim=True)
    return (mean - to_come) / (spread + MIN_RELATIVE_SPREAD * mean[..., :1])
