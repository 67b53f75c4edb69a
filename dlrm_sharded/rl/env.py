"""The placement environment: tables come one after the other, and each is placed on one rank.

All episodes of a batch take a step together. Sampling and training share one definition of a legal
action: a rank with enough memory left for the table. If there is none, the rank with the most
memory left is the only legal one, and the episode is marked as overflown.

Letters: E episodes, T tables in the order in which they are placed, W ranks, K numbers of a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dlrm_sharded.rl.task_tensors import TaskTensors


class Actor(Protocol):
    """A policy in the course of a batch of episodes; it tracks the tables on each rank."""

    def scores(self, step: int) -> Tensor:
        """Return [E, W]; the higher the score, the more probable the rank for table `step`."""

    def place(self, step: int, ranks: Tensor) -> None:
        """Record that table `step` was placed on the ranks [E]."""


@dataclass(frozen=True, slots=True)
class Placements:
    """Finished episodes.

    Args:
        ranks: [E, T].
        overflown: [E], whether some table had no legal rank.
        log_probs: [E, T], log-probabilities with which the ranks were drawn.
    """

    ranks: Tensor
    overflown: Tensor
    log_probs: Tensor


def legal_ranks(free: Tensor, size_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ranks on which a table may be placed.

    Args:
        free: [..., W], bytes.
        size_bytes: [...], bytes of the table.

    Returns:
        [..., W], legal ranks, at least one; [...], whether the table fits no rank.
    """
    fits = free >= size_bytes[..., None]
    overflows = ~fits.any(dim=-1)
    freest = torch.zeros_like(fits).scatter(-1, free.argmax(dim=-1, keepdim=True), True)
    return torch.where(overflows[..., None], freest, fits), overflows


def log_probabilities(scores: Tensor, legal: Tensor) -> Tensor:
    """Return [..., W], the log-probability of each rank, minus infinity for illegal ones."""
    return scores.masked_fill(~legal, -torch.inf).log_softmax(dim=-1)


def entropies(log_probs: Tensor, legal: Tensor) -> Tensor:
    """Return [...], the entropy of each distribution over ranks [..., W]."""
    # an illegal rank has probability 0; its log-probability of minus infinity would give nan
    return -(log_probs.exp() * log_probs.masked_fill(~legal, 0.0)).sum(dim=-1)


@torch.no_grad()
def roll_out(
    tasks: TaskTensors, actor: Actor, generator: torch.Generator, *, greedy: Tensor | None = None
) -> Placements:
    """Place all tables of all episodes.

    Args:
        tasks: tables in the order in which they are placed.
        greedy: [E], episodes that take the most probable rank instead of drawing one; ties go to
            the rank with the most memory left. By default all episodes draw.
    """
    shape = (tasks.num_episodes, tasks.num_tables)
    draws = torch.ones(shape[0], dtype=torch.bool) if greedy is None else ~greedy
    free = tasks.capacity.clone()
    ranks = torch.empty(shape, dtype=torch.long)
    log_probs = torch.empty(shape)
    overflown = torch.zeros(shape[0], dtype=torch.bool)
    for step in range(tasks.num_tables):
        size_bytes = tasks.size_bytes[:, step]
        legal, overflows = legal_ranks(free, size_bytes)
        log_p = log_probabilities(actor.scores(step), legal)
        # Gumbel-max trick: the largest of log-probability plus noise is a draw
        uniform = torch.rand(log_p.shape, generator=generator).clamp(1e-12, 1 - 1e-7)
        gumbel = -torch.log(-torch.log(uniform))
        perturbed = log_p + draws[:, None] * gumbel
        best = perturbed == perturbed.amax(dim=-1, keepdim=True)
        chosen = free.masked_fill(~best, torch.iinfo(free.dtype).min).argmax(dim=-1)
        actor.place(step, chosen)
        free.scatter_add_(1, chosen[:, None], -size_bytes[:, None])
        ranks[:, step] = chosen
        log_probs[:, step] = log_p.gather(1, chosen[:, None])[:, 0]
        overflown |= overflows
    return Placements(ranks, overflown, log_probs)


def one_hot(ranks: Tensor, world_size: int) -> Tensor:
    """Return [E, T, W], the ranks [E, T] one-hot encoded in fp32."""
    return torch.nn.functional.one_hot(ranks, world_size).float()


def sums_before_each_step(values: Tensor, ranks: Tensor, world_size: int) -> Tensor:
    """Return [E, T, W, K], sums of the values [E, T, K] of each rank's tables before each step."""
    placed = one_hot(ranks, world_size)[..., None] * values[:, :, None]
    return placed.cumsum(dim=1) - placed


def free_before_each_step(tasks: TaskTensors, ranks: Tensor) -> Tensor:
    """Return [E, T, W], the bytes left on each rank before each step."""
    placed = torch.nn.functional.one_hot(ranks, tasks.world_size) * tasks.size_bytes[..., None]
    return tasks.capacity[:, None] - (placed.cumsum(dim=1) - placed)
