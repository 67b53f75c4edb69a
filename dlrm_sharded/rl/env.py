"""The placement environment: tables come one after the other, and each gets a rank.

All episodes of a batch take a step together. What is legal is said here alone, for those who
sample and for those who train: a rank with memory left for the table. Where no rank has it, the
freest one is the only legal one, and the episode is marked as overflown.

Letters: E episodes, T tables in the order in which they are placed, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dlrm_sharded.rl.inputs import Inputs


class Actor(Protocol):
    """A policy at work on a batch of episodes: it keeps its own sums over the ranks' tables."""

    def scores(self, step: int) -> Tensor:
        """[E, W], higher for ranks that should take table `step`."""

    def place(self, step: int, ranks: Tensor) -> None:
        """Note that table `step` went to the ranks [E]."""


@dataclass(frozen=True, slots=True)
class Placements:
    """Finished episodes.

    Args:
        ranks: [E, T].
        overflown: [E], whether some table had no legal rank.
        log_probs: [E, T], of the ranks, as they were drawn.
    """

    ranks: Tensor
    overflown: Tensor
    log_probs: Tensor


def legal_ranks(free: Tensor, size_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """Where a table may go.

    Args:
        free: [..., W], bytes.
        size_bytes: [...], of the table.

    Returns:
        [..., W], legal ranks, at least one; [...], whether that one has no room for the table.
    """
    fits = free >= size_bytes[..., None]
    overflows = ~fits.any(dim=-1)
    freest = torch.zeros_like(fits).scatter(-1, free.argmax(dim=-1, keepdim=True), True)
    return torch.where(overflows[..., None], freest, fits), overflows


def log_probabilities(scores: Tensor, legal: Tensor) -> Tensor:
    """[..., W], minus infinity for what is not legal."""
    return scores.masked_fill(~legal, -torch.inf).log_softmax(dim=-1)


@torch.no_grad()
def roll_out(
    inputs: Inputs, actor: Actor, generator: torch.Generator, *, greedy: Tensor | None = None
) -> Placements:
    """Place all tables of all episodes.

    Args:
        inputs: tables in the order in which they are placed.
        greedy: [E], episodes that take the most probable rank, of equal ones the freest; None: all
            draw.
    """
    shape = (inputs.num_episodes, inputs.num_tables)
    draws = torch.ones(shape[0], dtype=torch.bool) if greedy is None else ~greedy
    free = inputs.capacity.clone()
    ranks = torch.empty(shape, dtype=torch.long)
    log_probs = torch.empty(shape)
    overflown = torch.zeros(shape[0], dtype=torch.bool)
    for step in range(inputs.num_tables):
        size_bytes = inputs.size_bytes[:, step]
        legal, overflows = legal_ranks(free, size_bytes)
        log_p = log_probabilities(actor.scores(step), legal)
        uniform = torch.rand(log_p.shape, generator=generator).clamp(1e-12, 1 - 1e-7)
        gumbel = -torch.log(-torch.log(uniform))
        drawn = log_p + draws[:, None] * gumbel  # its largest: a draw from the distribution
        best = drawn == drawn.amax(dim=-1, keepdim=True)
        chosen = free.masked_fill(~best, torch.iinfo(free.dtype).min).argmax(dim=-1)
        actor.place(step, chosen)
        free.scatter_add_(1, chosen[:, None], -size_bytes[:, None])
        ranks[:, step] = chosen
        log_probs[:, step] = log_p.gather(1, chosen[:, None])[:, 0]
        overflown |= overflows
    return Placements(ranks, overflown, log_probs)


def one_hot(ranks: Tensor, world_size: int) -> Tensor:
    """[E, T, W], of the ranks [E, T], as numbers."""
    return torch.nn.functional.one_hot(ranks, world_size).float()


def before_each(values: Tensor, ranks: Tensor, world_size: int) -> Tensor:
    """[E, T, W, K], sums over what is on a rank before each step, of values [E, T, K]."""
    placed = one_hot(ranks, world_size)[..., None] * values[:, :, None]
    return placed.cumsum(dim=1) - placed


def free_before_each(inputs: Inputs, ranks: Tensor) -> Tensor:
    """[E, T, W], bytes that are left before each step."""
    placed = torch.nn.functional.one_hot(ranks, inputs.world_size) * inputs.size_bytes[..., None]
    return inputs.capacity[:, None] - (placed.cumsum(dim=1) - placed)
