"""The iterated training of both methods.

Each round measures plans of the present policy, fits the cost network to all plans measured so far,
and improves the policy on costs that the network predicts (DreamShard, arXiv:2210.02023, Alg. 1).
A checkpoint is written after every round, and an interrupted training resumes with the next one.
What a round draws depends only on the seed and the number of the round.

Letters: E episodes, T tables.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_sharded.files.errors import DataError, check_count, check_number
from dlrm_sharded.files.json_files import replaced_file
from dlrm_sharded.files.line_file import changed_settings
from dlrm_sharded.plans.plan_cost import PlanCost
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.rl.env import Placements, roll_out
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.rl.task_tensors import TaskTensors
from dlrm_sharded.rl.tasks import DrawnTask, TaskPool

CHECKPOINT_KEYS = {"settings", "tasks", "ranks", "costs", "rounds", "net", "optimizers"}

HUBER_DELTA = 0.1
"""Relative error above which the loss is linear, because such a measurement may be an outlier."""

MeasurePlan = Callable[[ShardingTask, Sequence[int]], PlanCost]
"""Returns the cost of a task's tables on these ranks, measured or predicted by a cost model."""


@dataclass(frozen=True, slots=True)
class MeasuredPlans:
    """Plans with their measured costs.

    Args:
        tasks: scaled by the net's scaler.
        ranks: [E, T].
    """

    tasks: TaskTensors
    ranks: Tensor
    costs: tuple[PlanCost, ...]


@dataclass(slots=True)
class EpisodeMeans:
    """Means over a round's episodes of their predicted cost and of the policy's entropy."""

    cost_ms: float = 0.0
    entropy: float = 0.0
    num_updates: int = 0

    def add(self, *, cost_ms: float, entropy: float) -> None:
        self.num_updates += 1
        self.cost_ms += (cost_ms - self.cost_ms) / self.num_updates
        self.entropy += (entropy - self.entropy) / self.num_updates


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The position of a round in the training, and the random generators of the round."""

    number: int
    num_rounds: int
    torch_rng: torch.Generator
    numpy_rng: np.random.Generator

    @classmethod
    def seeded(cls, seed: int, number: int, num_rounds: int) -> RoundProgress:
        numpy_rng = np.random.default_rng([seed, number])
        torch_rng = torch.Generator().manual_seed(int(numpy_rng.integers(2**62)))
        return cls(number, num_rounds, torch_rng, numpy_rng)

    def shares_done(self, num_updates: int) -> Iterator[float]:
        """Yield the share of the whole training that is done before each update of the round."""
        for i in range(num_updates):
            yield (self.number + i / num_updates) / self.num_rounds

    def draw_batch(self, num_plans: int, batch_size: int) -> Tensor:
        """Draw the indices [batch_size] of plans, with replacement."""
        return torch.randint(num_plans, (batch_size,), generator=self.torch_rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodConfig(ABC):
    """Hyperparameters of a method, which conf/policy/*.yaml sets. Numbers of updates are per round.

    Args:
        cost_updates: gradient steps of the cost network.
        cost_batch: measured plans per gradient step.
        entropy_weight: weight of the policy's entropy in the loss.
    """

    cost_updates: int = 600
    cost_batch: int = 64
    cost_learning_rate: float = 2e-3
    policy_learning_rate: float = 1e-3
    entropy_weight: float = 1e-3

    def __post_init__(self) -> None:
        for parameter in dataclasses.fields(self):
            if parameter.type == "int":
                check_count(f"policy.{parameter.name}", getattr(self, parameter.name), least=1)
        for key in ("cost_learning_rate", "policy_learning_rate"):
            check_number(f"policy.{key}", getattr(self, key), above=True)
        check_number("policy.entropy_weight", self.entropy_weight)

    @property
    @abstractmethod
    def episodes(self) -> tuple[int, int, int]:
        """Batches of episodes in a round, tasks of a batch, and episodes of each task."""

    @abstractmethod
    def build(self) -> TrainingMethod:
        """Build the method with new networks."""


class TrainingMethod(ABC):
    """The steps of a method in a round; see `dreamshard.py` and `autoshard.py`.

    Args:
        cost, policy: the two networks of `net`, each of which has an optimizer.
    """

    def __init__(
        self, config: MethodConfig, net: PlacementNet, *, cost: nn.Module, policy: nn.Module
    ) -> None:
        self._config = config
        self.net = net
        self.optimizers = {
            "cost": torch.optim.Adam(cost.parameters()),
            "policy": torch.optim.Adam(policy.parameters()),
        }

    @abstractmethod
    def measured_ms(self, costs: Sequence[PlanCost]) -> tuple[Tensor, ...]:
        """Return what the cost network has to predict of E plans, as tensors [E, ...]."""

    @abstractmethod
    def cost_errors(
        self, tasks: TaskTensors, ranks: Tensor, measured_ms: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return relative errors of the cost network on plans; the last ones are those to report.

        Args:
            measured_ms: what `measured_ms` returned for these plans.
        """

    @abstractmethod
    def policy_losses(
        self, tasks: TaskTensors, placed: Placements
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the loss, entropy and predicted cost of the policy in episodes, for each update."""

    def fit_costs(self, plans: MeasuredPlans, progress: RoundProgress) -> float:
        """Fit the cost network, and return its mean error on the last batch in percent."""
        config, measured_ms = self._config, self.measured_ms(plans.costs)
        error = torch.zeros(())
        for done in progress.shares_done(config.cost_updates):
            batch = progress.draw_batch(len(plans.costs), config.cost_batch)
            errors = self.cost_errors(
                plans.tasks.select(batch),
                plans.ranks[batch],
                tuple(times_ms[batch] for times_ms in measured_ms),
            )
            loss = sum(map(_relative_error_loss, errors), start=torch.zeros(()))
            self._step("cost", loss, config.cost_learning_rate * (1.0 - done))
            error = errors[-1].detach().abs().mean()
        return 100 * float(error)

    def improve(self, pool: TaskPool, progress: RoundProgress) -> EpisodeMeans:
        """Improve the policy on the costs that the cost network predicts."""
        config, means = self._config, EpisodeMeans()
        num_batches, num_tasks, num_episodes = config.episodes
        for done in progress.shares_done(num_batches):
            drawn = pool.tensors([pool.draw(progress.numpy_rng) for _ in range(num_tasks)])
            tasks = self.net.scale_and_sort(drawn)[0].repeat(num_episodes)
            placed = roll_out(tasks, self.net.actor(tasks), progress.torch_rng)
            for update in self.policy_losses(tasks, placed):
                loss, entropy, cost = update
                loss = loss - config.entropy_weight * entropy
                self._step("policy", loss, config.policy_learning_rate * (1.0 - done))
            means.add(cost_ms=float(self.net.ms * cost), entropy=entropy.item())
        return means

    def _step(self, net: str, loss: Tensor, learning_rate: float) -> None:
        """Take one step of Adam with this learning rate."""
        optimizer = self.optimizers[net]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Figures of one round.

    Args:
        measured_ms: mean cost of the round's measured plans.
        cost_error_percent: error of the cost network on them.
        estimated_ms: mean predicted cost of the policy's episodes.
        entropy: mean entropy of the policy in these episodes.
        seconds: time of all updates, without the measurements.
    """

    number: int
    measured_ms: float
    cost_error_percent: float
    estimated_ms: float
    entropy: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSchedule:
    """How long to train.

    Args:
        num_rounds: rounds of measuring, fitting and improving.
        plans_per_round: plans that are measured in each round.
    """

    num_rounds: int = 10
    plans_per_round: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("schedule.num_rounds", self.num_rounds, least=1)
        check_count("schedule.plans_per_round", self.plans_per_round, least=1)
        check_count("schedule.seed", self.seed, least=0)


@dataclass(slots=True)
class _Collected:
    """Everything that a training has measured so far, and the results of its rounds."""

    tasks: list[DrawnTask] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)
    costs: list[PlanCost] = field(default_factory=list)
    rounds: list[RoundResult] = field(default_factory=list)


def _relative_error_loss(errors: Tensor) -> Tensor:
    """Return the mean Huber loss of relative errors."""
    return nn.functional.huber_loss(errors, torch.zeros_like(errors), delta=HUBER_DELTA)


def build_method(config: MethodConfig, *, seed: int) -> TrainingMethod:
    """Build a method whose initial weights depend on the seed alone; torch's state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return config.build()


def train_policy(
    method: TrainingMethod,
    pool: TaskPool,
    measure: MeasurePlan,
    schedule: RoundSchedule,
    *,
    is_trained: bool = False,
    checkpoint: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    on_round: Callable[[RoundResult], None] = lambda _: None,
) -> list[RoundResult]:
    """Train the method's networks and return the result of every round.

    Args:
        is_trained: the networks are those of a trained policy, so their inputs keep their scale.
        checkpoint: file that is written after every round; training resumes from it if it exists.
        settings: JSON that describes the training; a checkpoint with other settings is refused.
        on_round: called after every round.

    Raises:
        DataError: the checkpoint is damaged or belongs to another training.
    """
    net, collected = method.net, _Collected()
    if checkpoint is not None and checkpoint.exists():
        collected = _restore(checkpoint, method, settings or {})
    elif not is_trained:
        net.scaler.fit(*pool.table_tensors)
    for number in range(len(collected.rounds), schedule.num_rounds):
        progress = RoundProgress.seeded(schedule.seed, number, schedule.num_rounds)
        _measure_plans(net, pool, measure, progress, schedule.plans_per_round, collected)
        if number == 0:
            # the unit of predicted costs is the mean cost of a table
            totals = [rank.total_ms for cost in collected.costs for rank in cost.per_rank]
            net.ms.fill_(sum(totals) / len(collected.costs) / pool.num_tables)
        started = time.perf_counter()
        tasks = net.scaler(pool.tensors(collected.tasks))
        plans = MeasuredPlans(tasks, torch.tensor(collected.ranks), tuple(collected.costs))
        cost_error_percent = method.fit_costs(plans, progress)
        means = method.improve(pool, progress)
        newest = collected.costs[-schedule.plans_per_round :]
        collected.rounds.append(
            RoundResult(
                number=number,
                measured_ms=float(np.mean([cost.cost_ms for cost in newest])),
                cost_error_percent=cost_error_percent,
                estimated_ms=means.cost_ms,
                entropy=means.entropy,
                seconds=time.perf_counter() - started,
            )
        )
        if checkpoint is not None:
            _save(checkpoint, method, collected, settings or {})
        on_round(collected.rounds[-1])
    return collected.rounds


def _measure_plans(
    net: PlacementNet,
    pool: TaskPool,
    measure: MeasurePlan,
    progress: RoundProgress,
    num_plans: int,
    collected: _Collected,
) -> None:
    """Draw tasks, draw a plan for each from the present policy, and measure the plans."""
    drawn = [pool.draw(progress.numpy_rng) for _ in range(num_plans)]
    tasks, order = net.scale_and_sort(pool.tensors(drawn))
    with torch.no_grad():
        placed = roll_out(tasks, net.actor(tasks), progress.torch_rng)
    # undo the sorting: plans are stored with the tables in the order of the task
    all_ranks = torch.empty_like(order).scatter(1, order, placed.ranks).tolist()
    for task, ranks in zip(drawn, all_ranks, strict=True):
        collected.costs.append(measure(pool.task(task), ranks))
        collected.tasks.append(task)
        collected.ranks.append(ranks)


def _save(
    path: Path, method: TrainingMethod, collected: _Collected, settings: Mapping[str, Any]
) -> None:
    """Write the checkpoint completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "settings": json.dumps(settings, sort_keys=True),
        "tasks": [(t.set_index, t.tables.tolist(), t.memory_bytes) for t in collected.tasks],
        "ranks": collected.ranks,
        "costs": [cost.to_json() for cost in collected.costs],
        "rounds": [dataclasses.asdict(result) for result in collected.rounds],
        "net": method.net.state_dict(),
        "optimizers": {key: adam.state_dict() for key, adam in method.optimizers.items()},
    }
    with replaced_file(path) as file:
        torch.save(state, file)


def _restore(path: Path, method: TrainingMethod, settings: Mapping[str, Any]) -> _Collected:
    try:
        state = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
        state = None
    if not isinstance(state, dict) or set(state) != CHECKPOINT_KEYS:
        raise DataError(
            f"{path} is damaged or is not the checkpoint of a training; remove it to train from "
            "the start"
        )
    if changes := changed_settings(json.loads(state["settings"]), settings):
        raise DataError(
            f"{path} is the checkpoint of a training with other settings ({changes}); finish that "
            "training with its settings, or remove the file"
        )
    method.net.load_state_dict(state["net"])
    for key, optimizer in method.optimizers.items():
        optimizer.load_state_dict(state["optimizers"][key])
    return _Collected(
        tasks=[
            DrawnTask(set_index, np.array(tables), memory_bytes)
            for set_index, tables, memory_bytes in state["tasks"]
        ],
        ranks=state["ranks"],
        costs=[PlanCost.from_json(cost) for cost in state["costs"]],
        rounds=[RoundResult(**fields) for fields in state["rounds"]],
    )
