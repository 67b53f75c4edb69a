"""The placement environment: tables come one after another, and each is placed on one rank.

All episodes of a batch take a step together. Sampling and training share one definition of a legal
action: a rank with enough memory left for the table. If there is none, the rank with the most
memory left is the only legal one, and the episode is marked as overflown.

Letters: E episodes, T tables in the order in which they are placed, W ranks, K numbers of a table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_sharded.rl.task_tensors import TaskTensors


class Actor(ABC):
    """A policy in the course of a batch of episodes; it sums up the tables on each rank.

    Args:
        vectors: [E, T, K] each, vectors of the tables; the actor keeps their sums [E, W, K].
    """

    def __init__(self, tasks: TaskTensors, *vectors: Tensor) -> None:
        self._tasks, self._vectors = tasks, vectors
        shape = tasks.capacity.shape
        self._sums = [each.new_zeros((*shape, each.shape[-1])) for each in vectors]

    @abstractmethod
    def scores(self, step: int, free: Tensor) -> Tensor:
        """Return [E, W]; the higher the score, the more probable the rank for table `step`.

        Args:
            free: [E, W], bytes left on the ranks before the step.
        """

    def place(self, step: int, ranks: Tensor) -> None:
        """Place table `step` on the ranks [E]."""
        episodes = torch.arange(len(ranks))
        for sums, vectors in zip(self._sums, self._vectors, strict=True):
            sums[episodes, ranks] += vectors[:, step]


@dataclass(frozen=True, slots=True)
class Placements:
    """Finished episodes.

    Args:
        ranks: [E, T], the rank of each table.
        overflown: [E], whether some table fitted no rank.
        log_probs: [E, T], log-probabilities with which the ranks were drawn.
        free: [E, T, W], bytes left on the ranks before each step.
    """

    ranks: Tensor
    overflown: Tensor
    log_probs: Tensor
    free: Tensor


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


def replayed_log_probs(tasks: TaskTensors, placed: Placements, scores: Tensor) -> Tensor:
    """Return [E, T, W], log-probabilities of all ranks before each step of finished episodes.

    Args:
        scores: [E, T, W].
    """
    return log_probabilities(scores, legal_ranks(placed.free, tasks.size_bytes)[0])


def mean_entropy(log_probs: Tensor) -> Tensor:
    """Return [], the mean entropy of distributions over ranks [..., W]."""
    # an illegal rank has probability 0; its log-probability of minus infinity would give nan
    illegal = log_probs.isneginf()
    return -(log_probs.exp() * log_probs.masked_fill(illegal, 0.0)).sum(dim=-1).mean()


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
    num_episodes, num_tables = tasks.num_episodes, tasks.num_tables
    draws = torch.ones(num_episodes, dtype=torch.bool) if greedy is None else ~greedy
    free = tasks.capacity.clone()
    placed = Placements(
        ranks=torch.empty((num_episodes, num_tables), dtype=torch.long),
        overflown=torch.zeros(num_episodes, dtype=torch.bool),
        log_probs=torch.empty((num_episodes, num_tables)),
        free=free.new_empty((num_episodes, num_tables, tasks.world_size)),
    )
    for step in range(num_tables):
        placed.free[:, step] = free
        size_bytes = tasks.size_bytes[:, step]
        legal, overflows = legal_ranks(free, size_bytes)
        log_p = log_probabilities(actor.scores(step, free), legal)
        # Gumbel-max trick: the largest of log-probability plus noise is a draw
        uniform = torch.rand(log_p.shape, generator=generator).clamp(1e-12, 1 - 1e-7)
        gumbel = -torch.log(-torch.log(uniform))
        perturbed = log_p + draws[:, None] * gumbel
        best = perturbed == perturbed.amax(dim=-1, keepdim=True)
        chosen = free.masked_fill(~best, torch.iinfo(free.dtype).min).argmax(dim=-1)
        actor.place(step, chosen)
        free.scatter_add_(1, chosen[:, None], -size_bytes[:, None])
        placed.ranks[:, step] = chosen
        placed.log_probs[:, step] = log_p.gather(1, chosen[:, None])[:, 0]
        placed.overflown.logical_or_(overflows)
    return placed
