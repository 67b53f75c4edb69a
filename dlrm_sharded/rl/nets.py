"""Networks that both methods build on.

A table becomes a vector that is never negative and grows in proportion to its work; a rank is the
sum of its tables' vectors; functions of sums have no constant term. So an empty rank
costs nothing, costs keep growing in proportion far beyond the tables, ranks and batch sizes of the
training, and the choice of a rank does not depend on the scale of a task.

Letters: E episodes, T tables, F features, M terms of work, K numbers of a table, W ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm_sharded.rl.env import Actor
from dlrm_sharded.rl.task_tensors import FEATURE_NAMES, WORK_NAMES, TaskTensors

TABLE_LAYERS = (128, 32)
"""Layer sizes of the network that turns a table's features into its vector."""

VECTOR_SIZE = TABLE_LAYERS[-1]
HEAD_SIZE = 64
"""Size of the hidden layer between sums of vectors and a cost."""

MIN_RELATIVE_TABLE_COST = 0.1
"""Smallest cost of a table to divide by, relative to the mean cost of the task's tables."""


def mlp(sizes: Sequence[int], *, bias: bool = True, starts_at_zero: bool = False) -> nn.Sequential:
    """Build linear layers with ReLU between them.

    Args:
        starts_at_zero: whether the weights of the last layer are zero at first.
    """
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(sizes):
        last = nn.Linear(size_in, size_out, bias=bias)
        layers += [last, nn.ReLU()]
    if starts_at_zero:
        nn.init.zeros_(last.weight)
    return nn.Sequential(*layers[:-1])


class CostHead(nn.Module):
    """Maps sums of vectors to a cost: a linear layer plus an MLP whose output starts at zero.

    A rank costs nearly the sum of its tables; the MLP learns how fusing the tables changes that.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 1, bias=False)
        self.mlp = mlp([size, HEAD_SIZE, 1], bias=False, starts_at_zero=True)

    def forward(self, sums: Tensor) -> Tensor:
        """Return [...], the costs of sums [..., size]."""
        return (self.linear(sums) + self.mlp(sums))[..., 0]


class TableNet(nn.Module):
    """Vectors of tables: costs per unit of work by scaled features, multiplied by scaled work."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp([len(FEATURE_NAMES), *TABLE_LAYERS])

    def forward(self, tasks: TaskTensors) -> Tensor:
        """Return [E, T, K] for tasks that `InputScaler` has scaled."""
        unit_costs = self.net(tasks.features).exp()
        # every kind of work has an equal share of the K numbers
        return unit_costs * tasks.work.repeat_interleave(VECTOR_SIZE // len(WORK_NAMES), dim=-1)


class InputScaler(nn.Module):
    """Scales features to mean 0 and deviation 1 over the training tables, and work to mean 1.

    The scale is the same for all tasks: scaled within each task, features would not show how large
    a table is. Features beyond the range of the training tables are clipped to it.
    """

    mean: Tensor
    std: Tensor
    low: Tensor
    high: Tensor
    work: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("mean", 0.0), ("std", 1.0), ("low", -torch.inf), ("high", torch.inf)):
            self.register_buffer(name, torch.full((len(FEATURE_NAMES),), value))
        self.register_buffer("work", torch.ones(len(WORK_NAMES)))

    def fit(self, features: Tensor, work: Tensor) -> None:
        """Fit the scale to the features [N, F] and the work [N, M] of N tables."""
        self.mean.copy_(features.mean(dim=0))
        self.std.copy_(features.std(dim=0).clamp(min=1e-3))
        self.low.copy_(features.min(dim=0).values)
        self.high.copy_(features.max(dim=0).values)
        self.work.copy_(work.mean(dim=0))

    def forward(self, tasks: TaskTensors) -> TaskTensors:
        clipped = torch.minimum(torch.maximum(tasks.features, self.low), self.high)
        return dataclasses.replace(
            tasks, features=(clipped - self.mean) / self.std, work=tasks.work / self.work
        )


def sums_by_rank(vectors: Tensor, ranks: Tensor, world_size: int) -> Tensor:
    """Return [E, W, K], each rank's sum of the vectors [E, T, K] of tables on ranks [E, T]."""
    sums = vectors.new_zeros((len(vectors), world_size, vectors.shape[-1]))
    return sums.scatter_add(1, ranks[..., None].expand_as(vectors), vectors)


def one_hot(ranks: Tensor, world_size: int) -> Tensor:
    """Return [E, T, W], the ranks [E, T] one-hot encoded in fp32."""
    return nn.functional.one_hot(ranks, world_size).float()


def sums_before_each_step(vectors: Tensor, ranks: Tensor, world_size: int) -> Tensor:
    """Return [E, T, W, K], sums of the vectors [E, T, K] of each rank's tables before each step."""
    placed = one_hot(ranks, world_size)[..., None] * vectors[:, :, None]
    return placed.cumsum(dim=1) - placed


class PlacementNet(nn.Module, ABC):
    """The networks of one method, as training and sharding use them.

    A training updates its submodules `cost` and `policy` separately.

    Attributes:
        kind: name of the method.
        scaler: must be applied to tasks before the networks read them.
        ms: [1], milliseconds per unit of the costs that the networks predict.
    """

    kind: str
    ms: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scaler = InputScaler()
        self.register_buffer("ms", torch.ones(1))

    @abstractmethod
    def table_costs(self, tasks: TaskTensors) -> Tensor:
        """Return [E, T], the predicted cost of every table on a rank without other tables."""

    @abstractmethod
    def plan_costs(self, tasks: TaskTensors, ranks: Tensor) -> Tensor:
        """Return [E], the predicted cost of placing the tables on the ranks [E, T]."""

    @abstractmethod
    def actor(self, tasks: TaskTensors) -> Actor:
        """Return the policy before the first step of these episodes."""

    def positive_table_costs(self, tasks: TaskTensors) -> Tensor:
        """Return [E, T], `table_costs` with a positive lower limit, by which one can divide."""
        costs = self.table_costs(tasks)
        smallest = MIN_RELATIVE_TABLE_COST * costs.abs().mean(dim=1, keepdim=True) + 1e-12
        return torch.maximum(costs, smallest)

    @torch.no_grad()
    def scale_and_sort(self, tasks: TaskTensors) -> tuple[TaskTensors, Tensor]:
        """Return the scaled tasks, tables in descending order of cost, and that order [E, T]."""
        tasks = self.scaler(tasks)
        if tasks.costs is not None:
            network_costs = self.table_costs(dataclasses.replace(tasks, costs=None))
            costs = tasks.costs.with_mean(network_costs.mean(dim=1))
            tasks = dataclasses.replace(tasks, costs=costs)
        order = self.table_costs(tasks).argsort(dim=1, descending=True, stable=True)
        return tasks.reorder(order), order
