"""DreamShard (arXiv:2210.02023): a cost network, and a policy trained on what it estimates.

The cost network predicts, from sums of its tables' vectors, what a rank's forward computation,
communication and backward computation take, and from the largest of all ranks what the plan costs.
The policy sees the same of every rank as if it took the table, beside sums of its own, and gives
the rank a score. Hardware is asked for the cost network's data alone; the policy's episodes are
judged by the network (sec. 3.2 and 3.3).

Departures, each for a fault of the published code: one legality mask, in sampling and in training;
costs by name; features scaled over all tables instead of within a task; no part depends on the
number of ranks; sums are updated, all episodes at once, instead of calling a net per table. Others:
communication depends on the fullest rank too; scores are in units of the cost of the table that is
placed, so that they mean the same on any task; a step is judged by what came after it alone.

Letters: E episodes, T tables, W ranks, K numbers of a table, N measured plans.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlrm_sharded.errors import check_count, check_number
from dlrm_sharded.plan_cost import StageCost
from dlrm_sharded.rl.env import (
    before_each,
    free_before_each,
    legal_ranks,
    log_probabilities,
    roll_out,
)
from dlrm_sharded.rl.inputs import Inputs
from dlrm_sharded.rl.nets import HEAD, VECTOR, Head, PlacementNet, TableNet, mlp, sums_by_rank
from dlrm_sharded.rl.tasks import TaskPool
from dlrm_sharded.rl.training import Improved, MeasuredPlans, Progress, fit_loss, step

STAGES = ("forward", "communication", "backward")
COST_LAYERS = (64, 32)
LEAST_SPREAD = 0.01
"""Of the mean cost: what differs by less among a task's episodes is hardly an advantage."""

OVERFLOW_PENALTY = 1.0
"""By what share a plan that overflows a rank is dearer."""


class CostNetwork(nn.Module):
    """Costs of ranks and plans from sums of vectors (sec. 3.2), in units of `ms`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TableNet()
        self.forward_head = Head(VECTOR)
        self.communication_head = Head(2 * VECTOR)
        self.backward_head = Head(VECTOR)
        self.overall = mlp([VECTOR + len(STAGES) + 1, HEAD, 1], bias=False)
        last = self.overall[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)

    def stages(self, sums: Tensor, fullest: Tensor) -> Tensor:
        """[..., 3], the `STAGES` of ranks [..., K], where the largest of all ranks are [..., K]."""
        both = torch.cat([sums, fullest.expand_as(sums)], dim=-1)
        costs = [self.forward_head(sums), self.communication_head(both), self.backward_head(sums)]
        return torch.stack(costs, dim=-1)

    def plan(self, sums: Tensor, stages: Tensor) -> Tensor:
        """[...], of sums [..., W, K] and stages [..., W, 3]: the slowest rank, corrected."""
        total = stages.sum(dim=-1, keepdim=True)
        largest = torch.cat([sums, stages, total], dim=-1).amax(dim=-2)
        cost: Tensor = total.amax(dim=(-2, -1)) + self.overall(largest)[..., 0]
        return cost


class PolicyNetwork(nn.Module):
    """Scores of ranks (sec. 3.3)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TableNet()
        self.costs = mlp([len(STAGES), *COST_LAYERS], bias=False)
        self.score = nn.Linear(VECTOR + COST_LAYERS[-1], 1, bias=False)
        nn.init.zeros_(self.score.weight)  # at first, all legal ranks are alike

    def forward(self, sums: Tensor, stages: Tensor, table_cost: Tensor) -> Tensor:
        """[...], of ranks with the table: sums [..., K], stages [..., 3]; and of it alone [...]."""
        score: Tensor = self.score(torch.cat([sums, self.costs(stages)], dim=-1))[..., 0]
        return score / table_cost


class DreamShard(PlacementNet):
    """Both networks."""

    kind = "dreamshard"

    def __init__(self) -> None:
        super().__init__()
        self.cost = CostNetwork()
        self.policy = PolicyNetwork()

    def table_costs(self, inputs: Inputs) -> Tensor:
        vectors = self.cost.table(inputs)
        return self.cost.stages(vectors, vectors).sum(dim=-1)

    def plan_costs(self, inputs: Inputs, ranks: Tensor) -> Tensor:
        sums = sums_by_rank(self.cost.table(inputs), ranks, inputs.world_size)
        return self._plan_costs(sums)

    def costs_before(self, inputs: Inputs, ranks: Tensor) -> Tensor:
        """[E, T], of what is on the ranks [E, T] before each step."""
        return self._plan_costs(before_each(self.cost.table(inputs), ranks, inputs.world_size))

    def _plan_costs(self, sums: Tensor) -> Tensor:
        """[...], of sums [..., W, K]."""
        stages = self.cost.stages(sums, sums.amax(dim=-2, keepdim=True))
        return self.cost.plan(sums, stages)

    def actor(self, inputs: Inputs) -> DreamShardActor:
        return DreamShardActor(self, inputs)

    def scores(self, inputs: Inputs, ranks: Tensor) -> Tensor:
        """[E, T, W], what an actor that gave the tables these ranks [E, T] said at each step."""
        with torch.no_grad():
            vectors = self.cost.table(inputs)
            before = before_each(vectors, ranks, inputs.world_size)
            sums = before + vectors[:, :, None]
            fullest = torch.maximum(before.amax(dim=2, keepdim=True), sums)
            stages = self.cost.stages(sums, fullest)
            table_costs = self.positive_table_costs(inputs)
        vectors = self.policy.table(inputs)
        own = before_each(vectors, ranks, inputs.world_size) + vectors[:, :, None]
        scores: Tensor = self.policy(own, stages, table_costs[..., None])
        return scores


class DreamShardActor:
    """See `env.Actor`."""

    def __init__(self, net: DreamShard, inputs: Inputs) -> None:
        self._net = net
        self._cost_vectors = net.cost.table(inputs)
        self._vectors = net.policy.table(inputs)
        self._table_costs = net.positive_table_costs(inputs)
        shape = (inputs.num_episodes, inputs.world_size, VECTOR)
        self._cost_sums, self._sums = torch.zeros(shape), torch.zeros(shape)

    def scores(self, step: int) -> Tensor:
        sums = self._cost_sums + self._cost_vectors[:, step, None]
        fullest = torch.maximum(self._cost_sums.amax(dim=1, keepdim=True), sums)
        stages = self._net.cost.stages(sums, fullest)
        own = self._sums + self._vectors[:, step, None]
        scores: Tensor = self._net.policy(own, stages, self._table_costs[:, step, None])
        return scores

    def place(self, step: int, ranks: Tensor) -> None:
        index = ranks[:, None, None].expand(-1, 1, VECTOR)
        self._cost_sums.scatter_add_(1, index, self._cost_vectors[:, step, None])
        self._sums.scatter_add_(1, index, self._vectors[:, step, None])


class DreamShardTraining:
    """The two fits of each round (Alg. 1).

    Args:
        cost_updates, cost_batch, cost_learning_rate: of a round, in plans.
        policy_updates, policy_learning_rate: of a round.
        tasks_per_update, episodes_per_task: of each policy update; the mean of a task's episodes
            is their baseline.
        entropy_weight: of the policy's entropy in its loss.
    """

    def __init__(
        self,
        *,
        cost_updates: int = 600,
        cost_batch: int = 64,
        cost_learning_rate: float = 2e-3,
        policy_updates: int = 50,
        policy_learning_rate: float = 1e-3,
        tasks_per_update: int = 8,
        episodes_per_task: int = 8,
        entropy_weight: float = 1e-3,
    ) -> None:
        check_count("policy.cost_updates", cost_updates, least=1)
        check_count("policy.cost_batch", cost_batch, least=1)
        check_number("policy.cost_learning_rate", cost_learning_rate, above=True)
        check_count("policy.policy_updates", policy_updates, least=1)
        check_number("policy.policy_learning_rate", policy_learning_rate, above=True)
        check_count("policy.tasks_per_update", tasks_per_update, least=1)
        check_count("policy.episodes_per_task", episodes_per_task, least=2)
        check_number("policy.entropy_weight", entropy_weight)
        self.net = DreamShard()
        self.optimizers = {
            "cost": torch.optim.Adam(self.net.cost.parameters()),
            "policy": torch.optim.Adam(self.net.policy.parameters()),
        }
        self._cost_updates = cost_updates
        self._cost_batch = cost_batch
        self._cost_learning_rate = cost_learning_rate
        self._policy_updates = policy_updates
        self._policy_learning_rate = policy_learning_rate
        self._tasks_per_update = tasks_per_update
        self._episodes_per_task = episodes_per_task
        self._entropy_weight = entropy_weight

    def fit_costs(self, plans: MeasuredPlans, progress: Progress) -> float:
        """The mean relative error of the last batch, in percent."""
        targets = torch.tensor(
            [[_stages_ms(rank) for rank in cost.per_rank] for cost in plans.costs]
        )
        overall = torch.tensor([cost.cost_ms for cost in plans.costs])
        size = plans.inputs.world_size
        error = torch.zeros(())
        for done in progress.steps(self._cost_updates):
            chosen = torch.randint(len(plans.costs), (self._cost_batch,), generator=progress.random)
            inputs, ranks = plans.inputs.chosen(chosen), plans.ranks[chosen]
            sums = sums_by_rank(self.net.cost.table(inputs), ranks, size)
            stages = self.net.cost.stages(sums, sums.amax(dim=1, keepdim=True))
            # relative to a rank of the plan, as errors of its stages and ranks add up
            scale = targets[chosen].sum(dim=-1).mean(dim=1)
            of_stages = (self.net.ms * stages - targets[chosen]) / scale[:, None, None]
            of_plan = (self.net.ms * self.net.cost.plan(sums, stages) - overall[chosen]) / scale
            loss = fit_loss(of_stages) + fit_loss(of_plan)
            step(self.optimizers["cost"], loss, self._cost_learning_rate * (1.0 - done))
            error = of_plan.detach().abs().mean()
        return 100 * float(error)

    def improve(self, pool: TaskPool, progress: Progress) -> Improved:
        """REINFORCE on the estimated MDP (sec. 3.3)."""
        groups, size = self._tasks_per_update, self._episodes_per_task
        improved = Improved()
        for done in progress.steps(self._policy_updates):
            tasks = pool.inputs([pool.draw(progress.numpy) for _ in range(groups)])
            inputs = self.net.ordered(tasks)[0].repeated(size)
            with torch.no_grad():
                placed = roll_out(inputs, self.net.actor(inputs), progress.random)
                costs = self.net.plan_costs(inputs, placed.ranks)
                costs = costs * (1.0 + OVERFLOW_PENALTY * placed.overflown)
                to_come = costs[:, None] - self.net.costs_before(inputs, placed.ranks)
                advantage = advantages(to_come.view(groups, size, -1)).view_as(to_come)
                legal, _ = legal_ranks(free_before_each(inputs, placed.ranks), inputs.size_bytes)
            log_p = log_probabilities(self.net.scores(inputs, placed.ranks), legal)
            entropy = -(log_p.exp() * log_p.masked_fill(~legal, 0.0)).sum(dim=-1).mean()
            taken = log_p.gather(2, placed.ranks[..., None])[..., 0]
            loss = -(advantage * taken).mean() - self._entropy_weight * entropy
            step(self.optimizers["policy"], loss, self._policy_learning_rate * (1.0 - done))
            improved.add(cost_ms=float(self.net.ms * costs.mean()), entropy=entropy.item())
        return improved


def advantages(to_come: Tensor) -> Tensor:
    """[G, N, T], of each step's rank, by the cost that an episode still had to come before it.

    The baseline is the mean over the task's N episodes, the unit their spread; what the whole plan
    costs is said by the first step, before which there is nothing.

    Args:
        to_come: [G, N, T], of N episodes of each of G tasks.
    """
    mean, spread = to_come.mean(dim=1, keepdim=True), to_come.std(dim=1, keepdim=True)
    return (mean - to_come) / (spread + LEAST_SPREAD * mean[..., :1])


def _stages_ms(cost: StageCost) -> tuple[float, ...]:
    """In the order of `STAGES`."""
    return cost.fwd_compute_ms, cost.fwd_comm_ms + cost.bwd_comm_ms, cost.bwd_compute_ms
