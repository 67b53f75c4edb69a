"""Both networks: actor and training agree, and rank numbers do not matter."""

import dataclasses

import pytest
import torch
from torch import Tensor

from dlrm_sharded.rl.autoshard import AutoShard
from dlrm_sharded.rl.dreamshard import DreamShard, advantages
from dlrm_sharded.rl.env import Placements, replayed_log_probs, roll_out
from dlrm_sharded.rl.learned_policy import METHODS
from dlrm_sharded.rl.nets import VECTOR_SIZE, PlacementNet
from dlrm_sharded.rl.task_tensors import TaskTensors
from tests.unit.rl.cases import drawn_inputs, random_net, small_pool, trained

each_kind = pytest.mark.parametrize("kind", METHODS)
each_seed = pytest.mark.parametrize("seed", [0, 1, 2])


def ordered(net: PlacementNet, *, uneven: bool = False) -> TaskTensors:
    """Draw twelve tasks of seven tables, as actors read them."""
    inputs = drawn_inputs(small_pool(7, 3), 12)
    if uneven:
        random = torch.Generator().manual_seed(0)
        share = 0.7 + 0.6 * torch.rand(inputs.capacity.shape, generator=random)
        inputs = dataclasses.replace(inputs, capacity=(inputs.capacity * share).long())
    return net.scale_and_sort(inputs)[0]


def drawn(kind: str, seed: int, **keys: bool) -> tuple[PlacementNet, TaskTensors, Tensor]:
    """A net, tasks, and ranks of their tables."""
    net = random_net(kind, seed)
    inputs = ordered(net, **keys)
    random = torch.Generator().manual_seed(seed)
    return net, inputs, torch.randint(3, inputs.size_bytes.shape, generator=random)


def actor_scores(net: PlacementNet, inputs: TaskTensors, ranks: Tensor) -> Tensor:
    """Return [E, T, W], the scores of an actor that places the tables on these ranks."""
    actor, free = net.actor(inputs), inputs.capacity.clone()
    scores = []
    for step, placed in enumerate(ranks.unbind(1)):
        scores.append(actor.scores(step, free).clone())
        actor.place(step, placed)
        free.scatter_add_(1, placed[:, None], -inputs.size_bytes[:, step, None])
    return torch.stack(scores, dim=1)


def training_scores(net: PlacementNet, inputs: TaskTensors, placed: Placements) -> Tensor:
    """Return [E, T, W], the scores that a training computes for finished placements."""
    if isinstance(net, DreamShard):
        return net.scores(inputs, placed.ranks)
    history = net.history(inputs, placed)
    states = net.policy.states(inputs, history.table_costs)
    scores: Tensor = net.policy(states, history.sums, history.features)[0]
    return scores


def most_probable(net: PlacementNet, inputs: TaskTensors) -> Tensor:
    greedy = torch.ones(inputs.num_episodes, dtype=torch.bool)
    return roll_out(inputs, net.actor(inputs), torch.Generator(), greedy=greedy).ranks


@each_kind
@each_seed
def test_actor_and_training_compute_the_same_scores(kind: str, seed: int) -> None:
    net = random_net(kind, seed)
    inputs = ordered(net, uneven=True)
    placed = roll_out(inputs, net.actor(inputs), torch.Generator().manual_seed(seed))
    scores = actor_scores(net, inputs, placed.ranks)
    assert scores.std() > 0.01
    assert replayed_log_probs(inputs, placed, scores).isneginf().any(), "all ranks are legal"
    replayed = training_scores(net, inputs, placed)
    torch.testing.assert_close(scores, replayed, rtol=1e-4, atol=1e-4)


@each_kind
@each_seed
def test_renumbering_ranks_changes_nothing(kind: str, seed: int) -> None:
    net, inputs, ranks = drawn(kind, seed, uneven=True)
    to = torch.tensor([2, 0, 1])  # rank 0 is called 2 now
    renamed = dataclasses.replace(inputs, capacity=inputs.capacity[:, to.argsort()])
    scores = actor_scores(net, inputs, ranks)
    renamed_scores = actor_scores(net, renamed, to[ranks])
    torch.testing.assert_close(renamed_scores[..., to], scores, rtol=1e-5, atol=1e-5)

    plan = to[most_probable(net, inputs)]
    assert torch.equal(most_probable(net, renamed), plan)
    torch.testing.assert_close(
        net.plan_costs(renamed, plan), net.plan_costs(inputs, most_probable(net, inputs))
    )


@each_kind
@each_seed
def test_an_empty_rank_changes_no_score_of_the_others(kind: str, seed: int) -> None:
    net, inputs, ranks = drawn(kind, seed)
    wider = dataclasses.replace(
        inputs, capacity=torch.cat([inputs.capacity, inputs.capacity[:, :1]], dim=1)
    )
    wider_scores = actor_scores(net, wider, ranks)
    torch.testing.assert_close(wider_scores[..., :3], actor_scores(net, inputs, ranks))
    torch.testing.assert_close(wider_scores[:, 0, 3], wider_scores[:, 0, 0])


@each_kind
@each_seed
def test_the_scale_of_a_task_does_not_matter(kind: str, seed: int) -> None:
    """So no network of costs has a constant term, and an empty rank costs nothing."""
    net, inputs, ranks = drawn(kind, seed)
    larger = dataclasses.replace(inputs, work=8 * inputs.work)
    unscaled = drawn_inputs(small_pool(7, 3), 12)
    again, order = net.scale_and_sort(unscaled)
    assert torch.equal(again.work, inputs.work)
    larger_order = net.scale_and_sort(dataclasses.replace(unscaled, work=8 * unscaled.work))[1]
    assert torch.equal(larger_order, order)
    torch.testing.assert_close(actor_scores(net, larger, ranks), actor_scores(net, inputs, ranks))
    plan = most_probable(net, inputs)
    assert torch.equal(most_probable(net, larger), plan)
    torch.testing.assert_close(net.plan_costs(larger, plan), 8 * net.plan_costs(inputs, plan))


@each_kind
@each_seed
def test_plan_costs_rank_by_rank(kind: str, seed: int) -> None:
    net, inputs, ranks = drawn(kind, seed)
    found = net.plan_costs(inputs, ranks)
    vectors = net.cost.table(inputs)
    for episode in range(inputs.num_episodes):
        sums = [torch.zeros(VECTOR_SIZE) for _ in range(3)]
        for table, rank in enumerate(ranks[episode].tolist()):
            sums[rank] = sums[rank] + vectors[episode, table]
        largest_sums = torch.stack(sums).amax(dim=0)
        if isinstance(net, AutoShard):
            expected = max(float(net.cost(rank_sums, largest_sums)) for rank_sums in sums)
        else:
            stages = [net.cost.rank_costs(rank_sums, largest_sums) for rank_sums in sums]
            rank_figures = [
                torch.cat([rank_sums, stage, stage.sum()[None]])
                for rank_sums, stage in zip(sums, stages, strict=True)
            ]
            slowest = max(float(stage.sum()) for stage in stages)
            largest = torch.stack(rank_figures).amax(dim=0)
            expected = slowest + float(net.cost.overall(largest))
        assert float(found[episode]) == pytest.approx(expected, rel=1e-4, abs=1e-4)


@each_seed
def test_costs_before_each_step_are_those_of_the_tables_so_far(seed: int) -> None:
    net, inputs, ranks = drawn("dreamshard", seed)
    found = net.costs_before_each_step(inputs, ranks)
    assert (found[:, 0] == 0).all()
    for step in range(1, inputs.num_tables):
        so_far = dataclasses.replace(
            inputs,
            features=inputs.features[:, :step],
            work=inputs.work[:, :step],
            size_bytes=inputs.size_bytes[:, :step],
        )
        expected = net.plan_costs(so_far, ranks[:, :step])
        torch.testing.assert_close(found[:, step], expected, rtol=1e-4, atol=1e-4)


def test_advantages_compare_the_episodes_of_a_task_step_by_step() -> None:
    to_come = torch.tensor([[[10.0, 4.0], [12.0, 2.0]], [[1.0, 1.0], [1.0, 1.0]]])
    found = advantages(to_come)
    assert found.shape == to_come.shape
    # means 11 and 3, spreads 2 / sqrt(2), and a hundredth of the 11 that the plans cost
    unit = 2**0.5 + 0.11
    torch.testing.assert_close(found[0], torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) / unit)
    assert (found[1] == 0).all()


@each_kind
def test_tables_come_in_descending_order_of_predicted_cost(kind: str) -> None:
    net = trained(kind)
    unordered = drawn_inputs(small_pool(7, 3), 12)
    inputs, order = net.scale_and_sort(unordered)
    costs = net.table_costs(inputs)
    assert (costs.diff(dim=1) <= 1e-6 * costs[:, :1]).all()
    assert torch.equal(unordered.size_bytes.gather(1, order), inputs.size_bytes)
    assert torch.equal(order.sort(dim=1).values, torch.arange(7).expand(12, 7))
