"""Nets that both methods build on.

A table becomes a vector that is never negative and grows in proportion to its work, a rank the sum
of its tables' vectors; what is computed from sums has no constant terms. So an empty rank costs
nothing, costs grow in proportion far beyond the tables, ranks and batches of the training, and
which rank is best does not depend on the scale of a task.

Letters: E episodes, T tables, F features, K numbers of a table, W ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm_sharded.rl.env import Actor
from dlrm_sharded.rl.inputs import TABLE_FEATURES, WORK_TERMS, Inputs

TABLE_LAYERS = (128, 32)
VECTOR = TABLE_LAYERS[-1]
HEAD = 64
LEAST_SHARE = 0.1


def mlp(sizes: Sequence[int], *, bias: bool = True) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(sizes):
        layers += [nn.Linear(size_in, size_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Head(nn.Module):
    """A cost from sums: a linear layer, and an MLP beside it that begins with nothing.

    A rank costs nearly the sum of its tables; the MLP learns what their fusion changes.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 1, bias=False)
        self.mlp = mlp([size, HEAD, 1], bias=False)
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)

    def forward(self, sums: Tensor) -> Tensor:
        """[...], of [..., size]."""
        cost: Tensor = (self.linear(sums) + self.mlp(sums))[..., 0]
        return cost


class TableNet(nn.Module):
    """Vectors of tables: prices that depend on scaled features, times scaled work."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp([len(TABLE_FEATURES), *TABLE_LAYERS])

    def forward(self, inputs: Inputs) -> Tensor:
        """[E, T, K], of inputs that `Scaler` has scaled."""
        prices = self.net(inputs.features).exp()
        return prices * inputs.work.repeat_interleave(VECTOR // len(WORK_TERMS), dim=-1)


class Scaler(nn.Module):
    """Features with mean 0 and deviation 1 over the training tables, and work with mean 1.

    The same for all tasks: scaled within a task, features would not say how large a table is.
    Beyond the training tables' range, a feature is what it is at the range's edge.
    """

    mean: Tensor
    std: Tensor
    low: Tensor
    high: Tensor
    work: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("mean", 0.0), ("std", 1.0), ("low", -torch.inf), ("high", torch.inf)):
            self.register_buffer(name, torch.full((len(TABLE_FEATURES),), value))
        self.register_buffer("work", torch.ones(len(WORK_TERMS)))

    def fit(self, features: Tensor, work: Tensor) -> None:
        """To tables [N, F] and [N, M]."""
        self.mean.copy_(features.mean(dim=0))
        self.std.copy_(features.std(dim=0).clamp(min=1e-3))
        self.low.copy_(features.min(dim=0).values)
        self.high.copy_(features.max(dim=0).values)
        self.work.copy_(work.mean(dim=0))

    def forward(self, inputs: Inputs) -> Inputs:
        clipped = torch.minimum(torch.maximum(inputs.features, self.low), self.high)
        return dataclasses.replace(
            inputs, features=(clipped - self.mean) / self.std, work=inputs.work / self.work
        )


def sums_by_rank(vectors: Tensor, ranks: Tensor, world_size: int) -> Tensor:
    """[E, W, K], of vectors [E, T, K] on ranks [E, T]."""
    sums = vectors.new_zeros((len(vectors), world_size, vectors.shape[-1]))
    return sums.scatter_add(1, ranks[..., None].expand_as(vectors), vectors)


class PlacementNet(nn.Module, ABC):
    """What both methods are to those who train and use them. Costs are in units of `ms`.

    Args:
        kind: name of the method.
    """

    kind: str
    ms: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scaler()
        self.register_buffer("ms", torch.ones(1))

    @abstractmethod
    def table_costs(self, inputs: Inputs) -> Tensor:
        """[E, T], of every table alone."""

    @abstractmethod
    def plan_costs(self, inputs: Inputs, ranks: Tensor) -> Tensor:
        """[E], of all tables on the ranks [E, T]."""

    @abstractmethod
    def actor(self, inputs: Inputs) -> Actor:
        """The policy, before the first table."""

    def positive_table_costs(self, inputs: Inputs) -> Tensor:
        """[E, T], to divide by: `table_costs`, and not less than nearly nothing."""
        costs = self.table_costs(inputs)
        least = LEAST_SHARE * costs.abs().mean(dim=1, keepdim=True) + 1e-12
        return torch.maximum(costs, least)

    @torch.no_grad()
    def ordered(self, inputs: Inputs) -> tuple[Inputs, Tensor]:
        """Scaled, in descending order of predicted cost; and the order [E, T]."""
        inputs = self.scaler(inputs)
        order = self.table_costs(inputs).argsort(dim=1, descending=True, stable=True)
        return inputs.in_order(order), order
