"""The environment: legal ranks, draws, and episodes that overflow."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dlrm_sharded.rl.env import (
    Actor,
    legal_ranks,
    log_probabilities,
    mean_entropy,
    replayed_log_probs,
    roll_out,
)
from dlrm_sharded.rl.task_tensors import FEATURE_NAMES, WORK_NAMES, TaskTensors


class FixedScores(Actor):
    """Returns fixed scores [T, E, W] and records what is placed, and the memory before."""

    def __init__(self, scores: Tensor) -> None:
        self.all_scores = scores
        self.placed: list[Tensor] = []
        self.free: list[Tensor] = []

    def scores(self, step: int, free: Tensor) -> Tensor:
        assert step == len(self.placed)
        self.free.append(free.clone())
        return self.all_scores[step]

    def place(self, step: int, ranks: Tensor) -> None:
        assert step == len(self.placed)
        self.placed.append(ranks.clone())


def sized(size_bytes: list[list[int]], capacity: list[list[int]]) -> TaskTensors:
    """Build tasks of which only the sizes matter."""
    shape = (len(size_bytes), len(size_bytes[0]))
    return TaskTensors(
        features=torch.zeros((*shape, len(FEATURE_NAMES))),
        work=torch.ones((*shape, len(WORK_NAMES))),
        size_bytes=torch.tensor(size_bytes),
        capacity=torch.tensor(capacity),
    )


def used_bytes(inputs: TaskTensors, ranks: Tensor, step: int | None = None) -> Tensor:
    """[E, W], before a step or at the end, computed in a loop."""
    used = torch.zeros_like(inputs.capacity)
    for episode, episode_ranks in enumerate(ranks.tolist()):
        for table, rank in enumerate(episode_ranks[:step]):
            used[episode, rank] += inputs.size_bytes[episode, table]
    return used


def test_legal_ranks_have_enough_memory() -> None:
    free = torch.tensor([[5, 3, 9], [5, 3, 9], [2, 8, 8], [-3, -1, -2]])
    legal, overflows = legal_ranks(free, torch.tensor([5, 10, 9, 1]))
    assert legal.tolist() == [
        [True, False, True],
        [False, False, True],
        [False, True, False],
        [False, True, False],
    ]
    assert overflows.tolist() == [False, True, True, True]


def test_illegal_ranks_have_no_probability_and_no_gradient() -> None:
    random = torch.Generator().manual_seed(0)
    scores = torch.randn((64, 5, 4), generator=random).requires_grad_()
    legal = torch.rand((64, 5, 4), generator=random) < 0.6
    legal[..., 0] |= ~legal.any(dim=-1)
    ranks = legal.float().flatten(0, 1).multinomial(1, generator=random).view(64, 5)
    log_p = log_probabilities(scores, legal)
    assert (log_p.exp()[~legal] == 0).all()
    assert (log_p.exp()[legal] > 0).all()
    torch.testing.assert_close(log_p.exp().sum(dim=-1), torch.ones(64, 5))

    entropy = mean_entropy(log_p)
    expected = torch.distributions.Categorical(probs=log_p.detach().exp()).entropy().mean()
    torch.testing.assert_close(entropy.detach(), expected)
    taken = log_p.gather(2, ranks[..., None])[..., 0]
    advantage = torch.randn((64, 1), generator=random)
    (-(advantage * taken).mean() - 0.1 * entropy).backward()
    assert torch.isfinite(scores.grad).all()
    assert (scores.grad[~legal] == 0).all()
    choice = legal.sum(dim=-1, keepdim=True).expand_as(legal) > 1
    assert (scores.grad[legal & choice] != 0).all()


def test_draws_from_the_distribution() -> None:
    num = 20_000
    scores = torch.tensor([1.0, 0.0, 50.0, -1.0])
    inputs = sized([[2]] * num, [[2, 2, 1, 3]] * num)
    actor = FixedScores(scores.expand(1, num, 4))
    placed = roll_out(inputs, actor, torch.Generator().manual_seed(0))
    share = torch.bincount(placed.ranks[:, 0], minlength=4) / num
    expected = log_probabilities(scores, torch.tensor([True, True, False, True])).exp()
    assert share[2] == 0
    assert ((share - expected).abs() <= 4 * (expected * (1 - expected) / num).sqrt()).all()
    torch.testing.assert_close(placed.log_probs[:, 0].exp(), expected[placed.ranks[:, 0]])


def test_greedy_episodes_take_the_best_legal_rank() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])[:, None].expand(2, 400, 3)
    inputs = sized([[2, 2]] * 400, [[9, 3, 9]] * 400)
    greedy = torch.arange(400) < 100
    placed = roll_out(inputs, FixedScores(scores), torch.Generator().manual_seed(0), greedy=greedy)
    assert placed.ranks[:100].tolist() == [[1, 2]] * 100
    assert len(placed.ranks[100:].unique(dim=0)) > 3
    assert not placed.overflown.any()


@st.composite
def episodes(draw: st.DrawFn) -> tuple[TaskTensors, int]:
    """Sizes and memory from plenty to far too little, and a seed."""
    num, tables, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    size, memory = st.integers(1, 20), st.integers(1, 60)
    sizes = [[draw(size) for _ in range(tables)] for _ in range(num)]
    capacity = [[draw(memory) for _ in range(ranks)] for _ in range(num)]
    return sized(sizes, capacity), draw(st.integers(0, 2**32))


@given(episodes())
def test_a_rank_overflows_in_marked_episodes_alone(case: tuple[TaskTensors, int]) -> None:
    inputs, seed = case
    random = torch.Generator().manual_seed(seed)
    shape = (inputs.num_tables, inputs.num_episodes, inputs.world_size)
    scores = 3 * torch.randn(shape, generator=random)
    actor = FixedScores(scores)
    placed = roll_out(inputs, actor, torch.Generator().manual_seed(seed))

    assert torch.equal(torch.stack(actor.placed, dim=1), placed.ranks)
    assert ((placed.ranks >= 0) & (placed.ranks < inputs.world_size)).all()
    overflows = (used_bytes(inputs, placed.ranks) > inputs.capacity).any(dim=1)
    assert torch.equal(placed.overflown, overflows)

    for step, free in enumerate(actor.free):
        used = used_bytes(inputs, placed.ranks, step)
        assert torch.equal(free, inputs.capacity - used)
    assert torch.equal(torch.stack(actor.free, dim=1), placed.free)

    # the training sees the same legal ranks, and so the same probabilities
    log_p = replayed_log_probs(inputs, placed, scores.transpose(0, 1))
    taken = log_p.gather(2, placed.ranks[..., None])[..., 0]
    assert torch.equal(taken, placed.log_probs)
    assert torch.isfinite(taken).all()

    again = roll_out(inputs, FixedScores(scores), torch.Generator().manual_seed(seed))
    assert torch.equal(again.ranks, placed.ranks)
    assert torch.equal(again.log_probs, placed.log_probs)
