"""AutoShard (arXiv:2208.06399): multi-table costs, and an actor-critic that balances them.

A cost network predicts what the tables of a rank cost together (sec. 3.2). An LSTM reads the tables
in the order in which they are placed; a rank is described by the sum of its tables' vectors, its
predicted cost and its memory; its score comes from both and their product (sec. 3.3). IMPALA's
V-trace corrects for episodes that an earlier policy played.

Departures, each for a fault of the paper or its code: costs include communication; a rank without
memory is masked, and not learnt from a penalty; episodes are played in a batch in this process, and
no actor processes can hang; the reward is the cost of the slowest rank, step by step, with the
original balance of ranks to choose; what is said of a rank is relative to the table that is placed,
so that it means the same on any task.

Letters: E episodes, T tables, W ranks, K numbers of a table, H numbers of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlrm_sharded.errors import ConfigError, check_count, check_number
from dlrm_sharded.rl.env import (
    before_each,
    free_before_each,
    legal_ranks,
    log_probabilities,
    one_hot,
    roll_out,
)
from dlrm_sharded.rl.inputs import TABLE_FEATURES, Inputs
from dlrm_sharded.rl.nets import VECTOR, Head, PlacementNet, TableNet, mlp, sums_by_rank
from dlrm_sharded.rl.tasks import TaskPool
from dlrm_sharded.rl.training import Improved, MeasuredPlans, Progress, fit_loss, step

STATE = 64
SCORE_LAYERS = (128, 128, 64)
RANK_FIGURES = ("cost_with_table", "below_fullest", "memory_left")
REWARDS = ("cost", "balance")
BASELINE_WEIGHT = 0.5


class CostNetwork(nn.Module):
    """What a rank's tables cost together (sec. 3.2), in units of `ms`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TableNet()
        self.head = Head(2 * VECTOR)

    def forward(self, sums: Tensor, fullest: Tensor) -> Tensor:
        """[...], of sums [..., K], where the largest of all ranks are [..., K]."""
        costs: Tensor = self.head(torch.cat([sums, fullest.expand_as(sums)], dim=-1))
        return costs


class ActorCritic(nn.Module):
    """Scores of ranks, and what is still to be gained (sec. 3.3)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(len(TABLE_FEATURES) + 2, STATE, num_layers=2, batch_first=True)
        self.rank = mlp([VECTOR + len(RANK_FIGURES), STATE])
        self.score = mlp([3 * STATE, *SCORE_LAYERS, 1])
        self.value = mlp([3 * STATE, STATE, 1])

    def states(self, inputs: Inputs, table_costs: Tensor) -> Tensor:
        """[E, T, H], from the tables' features, and the shares that are placed before each."""
        share = table_costs / table_costs.sum(dim=1, keepdim=True)
        placed = share.cumsum(dim=1) - share
        read = torch.cat([inputs.features, share[..., None], placed[..., None]], dim=-1)
        states: Tensor = self.lstm(read)[0]
        return states

    def forward(self, states: Tensor, sums: Tensor, figures: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [..., W] and values [...].

        Args:
            states: [..., H].
            sums: [..., W, K], of ranks with the table, in costs of the table.
            figures: [..., W, 3], `RANK_FIGURES`.
        """
        ranks = self.rank(torch.cat([torch.log1p(sums), figures], dim=-1))
        state = states[..., None, :].expand_as(ranks)
        scores = self.score(torch.cat([state, ranks, state * ranks], dim=-1))[..., 0]
        of_all = torch.cat([states, ranks.mean(dim=-2), ranks.amax(dim=-2)], dim=-1)
        return scores, self.value(of_all)[..., 0]


class AutoShard(PlacementNet):
    """Both networks."""

    kind = "autoshard"

    def __init__(self) -> None:
        super().__init__()
        self.cost = CostNetwork()
        self.policy = ActorCritic()

    def table_costs(self, inputs: Inputs) -> Tensor:
        vectors = self.cost.table(inputs)
        costs: Tensor = self.cost(vectors, vectors)
        return costs

    def plan_costs(self, inputs: Inputs, ranks: Tensor) -> Tensor:
        sums = sums_by_rank(self.cost.table(inputs), ranks, inputs.world_size)
        costs: Tensor = self.cost(sums, sums.amax(dim=1, keepdim=True)).amax(dim=1)
        return costs

    def actor(self, inputs: Inputs) -> AutoShardActor:
        return AutoShardActor(self, inputs)

    def described(
        self, before: Tensor, vectors: Tensor, table_costs: Tensor, free: Tensor, inputs: Inputs
    ) -> tuple[Tensor, Tensor]:
        """Sums and `RANK_FIGURES` of ranks, as `ActorCritic` reads them.

        Args:
            before: [..., W, K], sums before the table is placed.
            vectors, table_costs: [..., K], [...], of the table.
            free: [..., W], bytes left with it.
        """
        fullest = before.amax(dim=-2, keepdim=True)
        sums = before + vectors[..., None, :]
        unit = table_costs[..., None]
        without = self.cost(before, fullest)
        costs = self.cost(sums, torch.maximum(fullest, sums))
        used = before.amax(dim=-1) > 0  # an empty rank is no measure for the others
        below = without.masked_fill(~used, -torch.inf).amax(dim=-1, keepdim=True) - without
        capacity = inputs.capacity.view(len(inputs.capacity), *[1] * (free.dim() - 2), -1)
        figures = torch.stack(
            [
                torch.log1p((costs / unit).clamp(min=0.0)),
                torch.log1p((below / unit).clamp(min=0.0)),
                free / capacity,
            ],
            dim=-1,
        )
        return sums / unit[..., None], figures

    @torch.no_grad()
    def histories(self, inputs: Inputs, ranks: Tensor) -> History:
        """All that an actor that gave the tables these ranks [E, T] saw, but for its states."""
        size = inputs.world_size
        vectors = self.cost.table(inputs)
        before = before_each(vectors, ranks, size)
        table_costs = self.positive_table_costs(inputs)
        free = free_before_each(inputs, ranks)
        sums, figures = self.described(
            before, vectors, table_costs, free - inputs.size_bytes[..., None], inputs
        )
        after = before + one_hot(ranks, size)[..., None] * vectors[:, :, None]
        costs = self.cost(after, after.amax(dim=2, keepdim=True))
        legal, _ = legal_ranks(free, inputs.size_bytes)
        return History(table_costs, sums, figures, costs, legal)


@dataclass(frozen=True, slots=True)
class History:
    """Of finished episodes.

    Args:
        table_costs: [E, T].
        sums, figures: [E, T, W, ...], before each step, see `AutoShard.described`.
        costs: [E, T, W], of ranks after each step.
        legal: [E, T, W].
    """

    table_costs: Tensor
    sums: Tensor
    figures: Tensor
    costs: Tensor
    legal: Tensor


class AutoShardActor:
    """See `env.Actor`."""

    def __init__(self, net: AutoShard, inputs: Inputs) -> None:
        self._net = net
        self._inputs = inputs
        self._vectors = net.cost.table(inputs)
        self._table_costs = net.positive_table_costs(inputs)
        self._states = net.policy.states(inputs, self._table_costs)
        self._sums = torch.zeros((inputs.num_episodes, inputs.world_size, VECTOR))
        self._free = inputs.capacity.clone()

    def scores(self, step: int) -> Tensor:
        free = self._free - self._inputs.size_bytes[:, step, None]
        sums, figures = self._net.described(
            self._sums, self._vectors[:, step], self._table_costs[:, step], free, self._inputs
        )
        scores: Tensor = self._net.policy(self._states[:, step], sums, figures)[0]
        return scores

    def place(self, step: int, ranks: Tensor) -> None:
        index = ranks[:, None, None].expand(-1, 1, VECTOR)
        self._sums.scatter_add_(1, index, self._vectors[:, step, None])
        self._free.scatter_add_(1, ranks[:, None], -self._inputs.size_bytes[:, step, None])


def rewards_of(reward: str, costs: Tensor, table_costs: Tensor, overflown: Tensor) -> Tensor:
    """[E, T], in parts of what the whole episode gains; one of `REWARDS`.

    `cost`: minus the cost of the slowest rank, as a multiple of what no placement can go below:
    the mean of the ranks, or the dearest table. `balance`: the least over the largest cost of a
    rank, as in the paper.

    Args:
        costs: [E, T, W], of ranks after each step.
        table_costs: [E, T].
        overflown: [E]; the last step of such an episode loses 1.
    """
    slowest = costs.amax(dim=2)
    if reward == "balance":
        so_far = costs.amin(dim=2) / slowest.clamp(min=1e-9)
    else:
        mean = table_costs.sum(dim=1) / costs.shape[2]
        so_far = -slowest / torch.maximum(mean, table_costs.amax(dim=1))[:, None]
    gains = torch.diff(so_far, dim=1, prepend=torch.zeros_like(so_far[:, :1]))
    gains[:, -1] -= overflown.float()
    return gains


def v_trace(log_rhos: Tensor, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Targets of the values and advantages of the actions, both [E, T].

    Espeholt et al. (arXiv:1802.01561), eq. 1 and sec. 4.2, without discount, weights cut at 1; an
    episode is worth nothing after its last step.

    Args:
        log_rhos: [E, T], of the actions' probabilities now over those when they were taken.
        values: [E, T], of the states before each step.
    """
    rhos = log_rhos.exp().clamp(max=1.0)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    errors = rhos * (rewards + following - values)
    corrections = []
    correction = torch.zeros_like(values[:, 0])
    for error, rho in zip(errors.unbind(1)[::-1], rhos.unbind(1)[::-1], strict=True):
        correction = error + rho * correction
        corrections.append(correction)
    targets = values + torch.stack(corrections[::-1], dim=1)
    next_targets = torch.cat([targets[:, 1:], torch.zeros_like(targets[:, :1])], dim=1)
    return targets, rhos * (rewards + next_targets - values)


class AutoShardTraining:
    """The cost network's fit and the actor-critic's updates.

    Args:
        cost_updates, cost_batch, cost_learning_rate: of a round, in plans.
        rollouts: batches of episodes of a round.
        updates_per_rollout: how often each batch is learnt from.
        tasks_per_rollout, episodes_per_task: of each batch.
        reward: one of `REWARDS`; balance is the paper's.
    """

    def __init__(
        self,
        *,
        cost_updates: int = 600,
        cost_batch: int = 64,
        cost_learning_rate: float = 2e-3,
        rollouts: int = 50,
        updates_per_rollout: int = 2,
        tasks_per_rollout: int = 8,
        episodes_per_task: int = 4,
        policy_learning_rate: float = 1e-3,
        entropy_weight: float = 1e-3,
        reward: str = "cost",
    ) -> None:
        check_count("policy.cost_updates", cost_updates, least=1)
        check_count("policy.cost_batch", cost_batch, least=1)
        check_number("policy.cost_learning_rate", cost_learning_rate, above=True)
        check_count("policy.rollouts", rollouts, least=1)
        check_count("policy.updates_per_rollout", updates_per_rollout, least=1)
        check_count("policy.tasks_per_rollout", tasks_per_rollout, least=1)
        check_count("policy.episodes_per_task", episodes_per_task, least=1)
        check_number("policy.policy_learning_rate", policy_learning_rate, above=True)
        check_number("policy.entropy_weight", entropy_weight)
        if reward not in REWARDS:
            raise ConfigError(f"policy.reward is {reward!r}; known: {', '.join(REWARDS)}")
        self.net = AutoShard()
        self.optimizers = {
            "cost": torch.optim.Adam(self.net.cost.parameters()),
            "policy": torch.optim.Adam(self.net.policy.parameters()),
        }
        self._cost_updates = cost_updates
        self._cost_batch = cost_batch
        self._cost_learning_rate = cost_learning_rate
        self._rollouts = rollouts
        self._updates_per_rollout = updates_per_rollout
        self._tasks_per_rollout = tasks_per_rollout
        self._episodes_per_task = episodes_per_task
        self._policy_learning_rate = policy_learning_rate
        self._entropy_weight = entropy_weight
        self._reward = reward

    def fit_costs(self, plans: MeasuredPlans, progress: Progress) -> float:
        """The mean relative error of the last batch's ranks, in percent."""
        targets = torch.tensor([[rank.total_ms for rank in cost.per_rank] for cost in plans.costs])
        size = plans.inputs.world_size
        error = torch.zeros(())
        for done in progress.steps(self._cost_updates):
            chosen = torch.randint(len(plans.costs), (self._cost_batch,), generator=progress.random)
            inputs, ranks = plans.inputs.chosen(chosen), plans.ranks[chosen]
            sums = sums_by_rank(self.net.cost.table(inputs), ranks, size)
            costs = self.net.ms * self.net.cost(sums, sums.amax(dim=1, keepdim=True))
            of_ranks = (costs - targets[chosen]) / targets[chosen].mean(dim=1, keepdim=True)
            loss = fit_loss(of_ranks)
            step(self.optimizers["cost"], loss, self._cost_learning_rate * (1.0 - done))
            error = of_ranks.detach().abs().mean()
        return 100 * float(error)

    def improve(self, pool: TaskPool, progress: Progress) -> Improved:
        """Actor-critic updates with V-trace."""
        improved = Improved()
        for done in progress.steps(self._rollouts):
            tasks = [pool.draw(progress.numpy) for _ in range(self._tasks_per_rollout)]
            inputs = self.net.ordered(pool.inputs(tasks))[0].repeated(self._episodes_per_task)
            placed = roll_out(inputs, self.net.actor(inputs), progress.random)
            history = self.net.histories(inputs, placed.ranks)
            rewards = rewards_of(self._reward, history.costs, history.table_costs, placed.overflown)
            for _ in range(self._updates_per_rollout):
                states = self.net.policy.states(inputs, history.table_costs)
                scores, values = self.net.policy(states, history.sums, history.figures)
                log_p = log_probabilities(scores, history.legal)
                taken = log_p.gather(2, placed.ranks[..., None])[..., 0]
                with torch.no_grad():
                    log_rhos = taken - placed.log_probs
                    targets, advantages = v_trace(log_rhos, rewards, values)
                entropy = -(log_p.exp() * log_p.masked_fill(~history.legal, 0.0)).sum(dim=-1)
                loss = (
                    -(advantages * taken).mean()
                    + BASELINE_WEIGHT * (targets - values).square().mean()
                    - self._entropy_weight * entropy.mean()
                )
                step(self.optimizers["policy"], loss, self._policy_learning_rate * (1.0 - done))
            slowest = history.costs[:, -1].amax(dim=1).mean()
            improved.add(cost_ms=float(self.net.ms * slowest), entropy=entropy.mean().item())
        return improved
