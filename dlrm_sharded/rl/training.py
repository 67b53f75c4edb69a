"""The iterated schedule that both methods are trained on.

A round measures plans that the present policy makes, fits the cost network to all plans measured so
far, and improves the policy on costs that the network predicts (DreamShard, arXiv:2210.02023,
Alg. 1). Every round is written to disk, and a training that was killed goes on with the next one;
what a round draws depends on the seed and its number alone.

Letters: E episodes, T tables.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_sharded.errors import DataError, check_count
from dlrm_sharded.plan_cost import PlanCost
from dlrm_sharded.rl.env import roll_out
from dlrm_sharded.rl.inputs import Inputs
from dlrm_sharded.rl.nets import PlacementNet
from dlrm_sharded.rl.tasks import DrawnTask, TaskPool
from dlrm_sharded.task import ShardingTask

KEPT = {"settings", "tasks", "ranks", "costs", "rounds", "net", "optimizers"}
"""Keys of a checkpoint."""

DISTURBED = 0.1
"""Relative error beyond which a measurement counts linearly, as it may be a disturbance."""

Measure = Callable[[ShardingTask, Sequence[int]], PlanCost]
"""What the tables of a task cost on these ranks: measured, or predicted in place of that."""


@dataclass(frozen=True, slots=True)
class MeasuredPlans:
    """Plans of tasks, and what they cost.

    Args:
        inputs: of the tasks, scaled.
        ranks: [E, T].
    """

    inputs: Inputs
    ranks: Tensor
    costs: tuple[PlanCost, ...]


@dataclass(slots=True)
class Improved:
    """Means over the updates of a round: what the policy's episodes cost, and its entropy."""

    cost_ms: float = 0.0
    entropy: float = 0.0
    num: int = 0

    def add(self, *, cost_ms: float, entropy: float) -> None:
        self.num += 1
        self.cost_ms += (cost_ms - self.cost_ms) / self.num
        self.entropy += (entropy - self.entropy) / self.num


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a round stands in the training, and its random numbers."""

    round: int
    num_rounds: int
    random: torch.Generator
    numpy: np.random.Generator

    @classmethod
    def of(cls, seed: int, round_: int, num_rounds: int) -> Progress:
        numpy = np.random.default_rng([seed, round_])
        random = torch.Generator().manual_seed(int(numpy.integers(2**62)))
        return cls(round_, num_rounds, random, numpy)

    def steps(self, num: int) -> Iterator[float]:
        """The share of the training that is done, before each of a round's steps."""
        for i in range(num):
            yield (self.round + i / num) / self.num_rounds


class Method(Protocol):
    """What a method does in a round; see `dreamshard.py` and `autoshard.py`."""

    @property
    def net(self) -> PlacementNet: ...

    @property
    def optimizers(self) -> dict[str, torch.optim.Adam]: ...

    def fit_costs(self, plans: MeasuredPlans, progress: Progress) -> float:
        """Fit the cost network; gives its error on the plans in percent."""

    def improve(self, pool: TaskPool, progress: Progress) -> Improved:
        """Improve the policy on what the cost network predicts."""


@dataclass(frozen=True, slots=True)
class Round:
    """What became of a round.

    Args:
        measured_ms: mean cost of its measured plans.
        error: of the cost network on them, in percent.
        cost_ms, entropy: of the policy's episodes.
        seconds: of fits and updates, without measurements.
    """

    number: int
    measured_ms: float
    error: float
    cost_ms: float
    entropy: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long to train.

    Args:
        num_rounds: of measuring, fitting, improving.
        plans_per_round: that are measured.
    """

    num_rounds: int = 10
    plans_per_round: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("schedule.num_rounds", self.num_rounds, least=1)
        check_count("schedule.plans_per_round", self.plans_per_round, least=1)
        check_count("schedule.seed", self.seed, least=0)


@dataclass(slots=True)
class _Memory:
    """What a training keeps between rounds, on disk and off it."""

    tasks: list[DrawnTask] = field(default_factory=list)
    ranks: list[list[int]] = field(default_factory=list)
    costs: list[PlanCost] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)


def step(optimizer: torch.optim.Adam, loss: Tensor, learning_rate: float) -> None:
    """One step of Adam, at a rate of its own."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def fit_loss(errors: Tensor) -> Tensor:
    """Of relative errors: squares, but linear beyond `DISTURBED`."""
    loss: Tensor = nn.functional.huber_loss(errors, torch.zeros_like(errors), delta=DISTURBED)
    return loss


def new_method(make: Callable[[], Method], *, seed: int) -> Method:
    """A method with networks that the seed decides, without touching torch's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def train(
    method: Method,
    pool: TaskPool,
    measure: Measure,
    schedule: Schedule,
    *,
    checkpoint: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    on_round: Callable[[Round], None] = lambda _: None,
) -> list[Round]:
    """Train the method's networks; gives what became of every round.

    Args:
        checkpoint: written after every round, and gone on from if it is there.
        settings: JSON; a checkpoint of others is refused.
        on_round: called after every round, with the networks as they are then.

    Raises:
        DataError: the checkpoint is damaged or of another training.
    """
    net, memory = method.net, _Memory()
    if checkpoint is not None and checkpoint.exists():
        memory = _restore(checkpoint, method, settings or {})
    else:
        net.scaler.fit(*pool.described)
    for number in range(len(memory.rounds), schedule.num_rounds):
        progress = Progress.of(schedule.seed, number, schedule.num_rounds)
        _measure_plans(net, pool, measure, progress, schedule.plans_per_round, memory)
        if number == 0:
            totals = [rank.total_ms for cost in memory.costs for rank in cost.per_rank]
            net.ms.fill_(sum(totals) / len(memory.costs) / pool.num_tables)
        started = time.perf_counter()
        inputs = net.scaler(pool.inputs(memory.tasks))
        plans = MeasuredPlans(inputs, torch.tensor(memory.ranks), tuple(memory.costs))
        error = method.fit_costs(plans, progress)
        improved = method.improve(pool, progress)
        newest = memory.costs[-schedule.plans_per_round :]
        memory.rounds.append(
            Round(
                number=number,
                measured_ms=float(np.mean([cost.cost_ms for cost in newest])),
                error=error,
                cost_ms=improved.cost_ms,
                entropy=improved.entropy,
                seconds=time.perf_counter() - started,
            )
        )
        if checkpoint is not None:
            _save(checkpoint, method, memory, settings or {})
        on_round(memory.rounds[-1])
    return memory.rounds


def _measure_plans(
    net: PlacementNet,
    pool: TaskPool,
    measure: Measure,
    progress: Progress,
    num_plans: int,
    memory: _Memory,
) -> None:
    """Plans of new tasks, drawn from the present policy."""
    drawn = [pool.draw(progress.numpy) for _ in range(num_plans)]
    inputs, order = net.ordered(pool.inputs(drawn))
    with torch.no_grad():
        placed = roll_out(inputs, net.actor(inputs), progress.random)
    ranks = torch.empty_like(order).scatter(1, order, placed.ranks).tolist()
    for task, of_task in zip(drawn, ranks, strict=True):
        memory.costs.append(measure(pool.task(task), of_task))
        memory.tasks.append(task)
        memory.ranks.append(of_task)


def _save(path: Path, method: Method, memory: _Memory, settings: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")  # one that a kill left is overwritten
    kept = {
        "settings": json.dumps(settings, sort_keys=True),
        "tasks": [(t.of_set, t.tables.tolist(), t.memory_bytes) for t in memory.tasks],
        "ranks": memory.ranks,
        "costs": [cost.to_json() for cost in memory.costs],
        "rounds": [dataclasses.asdict(each) for each in memory.rounds],
        "net": method.net.state_dict(),
        "optimizers": {key: each.state_dict() for key, each in method.optimizers.items()},
    }
    torch.save(kept, partial)
    partial.replace(path)


def _restore(path: Path, method: Method, settings: Mapping[str, Any]) -> _Memory:
    try:
        kept = torch.load(path, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
        kept = None
    if not isinstance(kept, dict) or set(kept) != KEPT:
        raise DataError(f"{path} is no unfinished training, or damaged; remove it to begin anew")
    if kept["settings"] != json.dumps(settings, sort_keys=True):
        before = json.loads(kept["settings"])
        changes = "; ".join(
            f"{key}: {before.get(key)!r}, now {settings.get(key)!r}"
            for key in sorted({*before, *settings})
            if before.get(key) != settings.get(key)
        )
        raise DataError(
            f"{path} is an unfinished training of other settings ({changes}); finish it with "
            "those, or remove it"
        )
    method.net.load_state_dict(kept["net"])
    for key, optimizer in method.optimizers.items():
        optimizer.load_state_dict(kept["optimizers"][key])
    return _Memory(
        tasks=[
            DrawnTask(of_set, np.array(tables), memory) for of_set, tables, memory in kept["tasks"]
        ],
        ranks=kept["ranks"],
        costs=[PlanCost.from_json(cost) for cost in kept["costs"]],
        rounds=[Round(**each) for each in kept["rounds"]],
    )
