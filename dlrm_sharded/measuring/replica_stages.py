"""Splits the backward pass of replicas into the stages that `measure` times.

In training, DDP averages a replica's gradients within the backward pass, and the optimizer updates
the weights in its step. Here, the all-reduce is an exchange of gradients (`bwd_comm`), while the
dense gradients and the update are computation (`bwd_compute`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dlrm_sharded.model.replicas import ReplicaWeights, ShardedTables, replica_lookups, replicas_of


class ReplicaStages:
    """Reduces and updates the replicas of a collection; does nothing if there are none.

    Args:
        optimizer: updates the replicas; None if there are none.
    """

    def __init__(self, replicas: Sequence[ReplicaWeights], optimizer: Optimizer | None) -> None:
        if replicas and optimizer is None:
            raise ValueError("the plan has replicas, but measure() got no optimizer of them")
        self._replicas = replicas
        self.places = {of.place for of in replicas}
        """Indices of the replicas' lookups among those of the collection."""
        self._optimizer = optimizer
        # DDP has such a bucket for the gradients of each parameter, too.
        self._buckets = [torch.zeros_like(of.weights.detach()) for of in replicas]

    def all_reduce(self) -> None:
        """Sum the gradients over the ranks, in DDP's group; they are zeros before and after."""
        for of, bucket in zip(self._replicas, self._buckets, strict=True):
            dist.all_reduce(bucket, group=of.group)

    def update(self, looked_up: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compute the gradients of the weights, and apply them as if they had been reduced.

        DDP copies them to its bucket before it reduces them, divided by the number of ranks.

        Args:
            looked_up: vectors of all lookups of the collection.
            gradients: of these vectors.
        """
        for of, bucket in zip(self._replicas, self._buckets, strict=True):
            # A backward pass to the weights themselves would call DDP's hooks. DDP counts the calls
            # before its first step, and would wait for as many in each later one.
            [gradient] = torch.autograd.grad(
                looked_up[of.place], of.weights, gradients[of.place], retain_graph=True
            )
            torch.mul(gradient, 1 / dist.get_world_size(of.group), out=bucket)
            of.weights.grad = bucket
        if self._optimizer is not None:
            self._optimizer.step()
        for of in self._replicas:
            of.weights.grad = None


@contextmanager
def replica_stages(
    embeddings: ShardedTables, optimizer: Optimizer | None
) -> Iterator[ReplicaStages]:
    """Take the lookups of replicas out of DDP within the block."""
    replicas = replicas_of(embeddings)
    wrapped = replica_lookups(embeddings)
    gradients: list[Tensor | None] = [of.weights.grad for of in replicas]
    stages = ReplicaStages(replicas, optimizer)
    try:
        for place, lookup in wrapped.items():
            embeddings._lookups[place] = lookup.module
        for of in replicas:
            of.weights.grad = None
        yield stages
    finally:
        for place, lookup in wrapped.items():
            embeddings._lookups[place] = lookup
        for of, gradient in zip(replicas, gradients, strict=True):
            of.weights.grad = gradient
