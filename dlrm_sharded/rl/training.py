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
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, TypeVar

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

Net = TypeVar("Net", bound=PlacementNet)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMethod(ABC, Generic[Net]):
    """The losses of a method and its hyperparameters, whose values conf/policy/*.yaml states.

    Numbers of updates are per round. See `dreamshard.py` and `autoshard.py`.

    Args:
        cost_updates: gradient steps of the cost network.
        cost_batch: measured plans per gradient step.
        cost_learning_rate, policy_learning_rate: initial values; they fall to 0 by the end.
        entropy_weight: weight of the policy's entropy in the loss.
    """

    net_class: ClassVar[type[PlacementNet]]

    cost_updates: int
    cost_batch: int
    cost_learning_rate: float
    policy_learning_rate: float
    entropy_weight: float

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
    def measured_ms(self, costs: Sequence[PlanCost]) -> tuple[Tensor, ...]:
        """Return what the cost network has to predict for E plans, as tensors [E, ...]."""

    @abstractmethod
    def cost_errors(
        self, net: Net, tasks: TaskTensors, ranks: Tensor, measured_ms: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return relative errors of the cost network on plans; the last ones are those to report.

        Args:
            ranks: [E, T].
            measured_ms: what `measured_ms` returned for these plans.
        """

    @abstractmethod
    def policy_losses(
        self, net: Net, tasks: TaskTensors, placed: Placements
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the loss, entropy and predicted cost of the policy in episodes, for each update."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """Figures of one round.

    Args:
        measured_ms: mean cost of the round's measured plans.
        cost_error_percent: error of the cost network on its last batch of measured plans.
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

    num_rounds: int
    plans_per_round: int
    seed: int

    def __post_init__(self) -> None:
        check_count("schedule.num_rounds", self.num_rounds, least=1)
        check_count("schedule.plans_per_round", self.plans_per_round, least=1)
        check_count("schedule.seed", self.seed, least=0)

    def learning_rates(self, first: float, number: int, num_updates: int) -> Iterator[float]:
        """Yield the learning rate of each update of a round; they fall to 0 over all rounds."""
        for i in range(num_updates):
            yield first * (1.0 - (number + i / num_updates) / self.num_rounds)


class PolicyTraining:
    """Networks in training, with all that was measured for them.

    Their initial weights depend on the seed alone, and torch's global random state is unchanged.
    """

    def __init__(
        self, method: TrainingMethod[Any], pool: TaskPool, schedule: RoundSchedule
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(schedule.seed)
            self.net: PlacementNet = method.net_class()
        self.schedule = schedule
        self.rounds: list[RoundResult] = []
        self._method, self._pool = method, pool
        self._tasks: list[DrawnTask] = []
        self._ranks: list[list[int]] = []
        self._costs: list[PlanCost] = []
        self._optimizers = {
            part: torch.optim.Adam(self.net.get_submodule(part).parameters())
            for part in ("cost", "policy")
        }

    def run(
        self,
        measure: MeasurePlan,
        *,
        is_trained: bool = False,
        checkpoint: Path | None = None,
        settings: Mapping[str, Any] | None = None,
        on_round: Callable[[RoundResult], None] = lambda _: None,
    ) -> None:
        """Train the networks.

        Args:
            is_trained: whether the networks are those of a trained policy, whose scale is kept.
            checkpoint: file that is written after every round; training resumes from it if it
                exists.
            settings: JSON that describes the training; a checkpoint with other settings is refused.
            on_round: called after every round.

        Raises:
            DataError: the checkpoint is damaged or belongs to another training.
        """
        if checkpoint is not None and checkpoint.exists():
            self._restore(checkpoint, settings or {})
        elif not is_trained:
            self.net.scaler.fit(*self._pool.table_tensors)
        for number in range(len(self.rounds), self.schedule.num_rounds):
            self.rounds.append(self._round(number, measure))
            if checkpoint is not None:
                self._save(checkpoint, settings or {})
            on_round(self.rounds[-1])

    def _round(self, number: int, measure: MeasurePlan) -> RoundResult:
        net, pool = self.net, self._pool
        numpy_rng = np.random.default_rng([self.schedule.seed, number])
        torch_rng = torch.Generator().manual_seed(int(numpy_rng.integers(2**62)))
        # measure a plan of the present policy for each of some new tasks
        drawn = [pool.draw(numpy_rng) for _ in range(self.schedule.plans_per_round)]
        tasks, order = net.scale_and_sort(pool.tensors(drawn))
        with torch.no_grad():
            placed = roll_out(tasks, net.actor(tasks), torch_rng)
        # undo the sorting: plans are stored with the tables in the order of the task
        all_ranks = torch.empty_like(order).scatter(1, order, placed.ranks).tolist()
        newest = list(map(measure, map(pool.task, drawn), all_ranks))
        self._tasks += drawn
        self._ranks += all_ranks
        self._costs += newest
        if number == 0:
            # the unit of predicted costs is the mean cost of a table
            totals = [rank.total_ms for cost in newest for rank in cost.per_rank]
            net.ms.fill_(sum(totals) / len(newest) / pool.num_tables)
        started = time.perf_counter()
        cost_error = self._fit_costs(number, torch_rng)
        estimated_ms, entropy = self._improve_policy(number, numpy_rng, torch_rng)
        return RoundResult(
            number=number,
            measured_ms=fmean(cost.cost_ms for cost in newest),
            cost_error_percent=100 * cost_error,
            estimated_ms=estimated_ms,
            entropy=entropy,
            seconds=time.perf_counter() - started,
        )

    def _fit_costs(self, number: int, torch_rng: torch.Generator) -> float:
        """Fit the cost network, and return its mean relative error on the last batch."""
        method, net = self._method, self.net
        tasks = net.scaler(self._pool.tensors(self._tasks))
        ranks, measured_ms = torch.tensor(self._ranks), method.measured_ms(self._costs)
        error = torch.zeros(())
        for learning_rate in self.schedule.learning_rates(
            method.cost_learning_rate, number, method.cost_updates
        ):
            batch = torch.randint(len(ranks), (method.cost_batch,), generator=torch_rng)
            batch_ms = tuple(times_ms[batch] for times_ms in measured_ms)
            errors = method.cost_errors(net, tasks.select(batch), ranks[batch], batch_ms)
            loss = torch.zeros(())
            for relative in errors:
                zeros = torch.zeros_like(relative)
                loss = loss + nn.functional.huber_loss(relative, zeros, delta=HUBER_DELTA)
            self._step("cost", loss, learning_rate)
            error = errors[-1].detach().abs().mean()
        return float(error)

    def _improve_policy(
        self, number: int, numpy_rng: np.random.Generator, torch_rng: torch.Generator
    ) -> tuple[float, float]:
        """Improve the policy on predicted costs.

        Returns:
            Mean predicted cost of the episodes in ms; mean entropy of the policy in them.
        """
        method, net = self._method, self.net
        num_batches, num_tasks, num_episodes = method.episodes
        costs_ms, entropies = [], []
        for learning_rate in self.schedule.learning_rates(
            method.policy_learning_rate, number, num_batches
        ):
            drawn = self._pool.tensors([self._pool.draw(numpy_rng) for _ in range(num_tasks)])
            tasks = net.scale_and_sort(drawn)[0].repeat(num_episodes)
            placed = roll_out(tasks, net.actor(tasks), torch_rng)
            for losses in method.policy_losses(net, tasks, placed):
                loss, entropy, cost = losses
                self._step("policy", loss - method.entropy_weight * entropy, learning_rate)
            costs_ms.append(float(net.ms * cost))
            entropies.append(entropy.item())
        return fmean(costs_ms), fmean(entropies)

    def _step(self, part: str, loss: Tensor, learning_rate: float) -> None:
        """Take one step of Adam on a part of the networks."""
        optimizer = self._optimizers[part]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def _save(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Write the checkpoint completely or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": json.dumps(settings, sort_keys=True),
            "tasks": [tuple(task) for task in self._tasks],
            "ranks": self._ranks,
            "costs": [cost.to_json() for cost in self._costs],
            "rounds": [dataclasses.asdict(result) for result in self.rounds],
            "net": self.net.state_dict(),
            "optimizers": {key: adam.state_dict() for key, adam in self._optimizers.items()},
        }
        with replaced_file(path) as file:
            torch.save(state, file)

    def _restore(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Resume from a checkpoint; DataError if it is damaged or of another training."""
        try:
            state = torch.load(path, weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
            state = None
        if not isinstance(state, dict) or set(state) != CHECKPOINT_KEYS:
            raise DataError(
                f"{path} is damaged or is not the checkpoint of a training; remove it to train "
                "from the start"
            )
        if changes := changed_settings(json.loads(state["settings"]), settings):
            raise DataError(
                f"{path} is the checkpoint of a training with other settings ({changes}); finish "
                "that training with its settings, or remove the file"
            )
        self.net.load_state_dict(state["net"])
        for key, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][key])
        self._tasks = [DrawnTask(*fields) for fields in state["tasks"]]
        self._ranks = state["ranks"]
        self._costs = [PlanCost.from_json(cost) for cost in state["costs"]]
        self.rounds = [RoundResult(**fields) for fields in state["rounds"]]
