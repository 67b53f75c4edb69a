"""AutoShard's targets and rewards, against their formulas as the papers write them."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dlrm_sharded.rl.autoshard import REWARDS, step_rewards, v_trace

Floats = NDArray[np.float64]


def literal(log_rhos: Floats, rewards: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Espeholt et al., eq. 1: a sum over t of products over i, of one episode [T]."""
    num = len(rewards)
    ratios = np.exp(log_rhos)
    rho, c = np.minimum(1.0, ratios), np.minimum(1.0, ratios)
    value = np.append(values, 0.0)
    delta = [rho[t] * (rewards[t] + value[t + 1] - value[t]) for t in range(num)]
    targets = np.array(
        [value[s] + sum(np.prod(c[s:t]) * delta[t] for t in range(s, num)) for s in range(num)]
    )
    following = np.append(targets[1:], 0.0)
    return targets, rho * (rewards + following - values)


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("num_tables", [1, 2, 9])
def test_v_trace_is_that_of_the_paper(num_tables: int, spread: float) -> None:
    rng = np.random.default_rng(num_tables)
    log_rhos = spread * rng.normal(size=(5, num_tables))
    rewards, values = rng.normal(size=(2, 5, num_tables))
    targets, advantages = v_trace(*map(torch.from_numpy, (log_rhos, rewards, values)))
    for episode in range(5):
        expected = literal(log_rhos[episode], rewards[episode], values[episode])
        np.testing.assert_allclose(targets[episode].numpy(), expected[0], rtol=1e-9)
        np.testing.assert_allclose(advantages[episode].numpy(), expected[1], rtol=1e-9)


@pytest.mark.parametrize("reward", REWARDS)
def test_rewards_add_up_to_what_an_episode_gains(reward: str) -> None:
    rng = np.random.default_rng(0)
    costs = np.cumsum(rng.uniform(0.1, 1.0, (6, 8, 3)), axis=1)
    table_costs = rng.uniform(0.1, 2.0, (6, 8))
    table_costs[0, 3] = 100.0  # costlier than the mean of the ranks
    overflown = np.array([False, False, True, False, True, False])
    fits = torch.zeros(6, dtype=torch.bool)
    rewards = step_rewards(reward, *map(torch.from_numpy, (costs, table_costs, overflown)))
    fitting = step_rewards(reward, torch.from_numpy(costs), torch.from_numpy(table_costs), fits)
    assert torch.equal(rewards[:, :-1], fitting[:, :-1]), "the last step pays for an overflow"
    for episode in range(6):
        final = costs[episode, -1]
        if reward == "balance":
            expected = final.min() / final.max()
        else:
            least = max(table_costs[episode].sum() / 3, table_costs[episode].max())
            expected = -final.max() / least
        expected -= float(overflown[episode])
        assert float(rewards[episode].sum()) == pytest.approx(expected)


def test_rewards_of_an_episode_whose_first_ranks_are_empty() -> None:
    """The paper's balance is 0 until every rank has a table."""
    costs = torch.tensor([[[2.0, 0.0], [2.0, 1.0]]])
    table_costs = torch.tensor([[2.0, 1.0]])
    fits = torch.tensor([False])
    assert step_rewards("balance", costs, table_costs, fits).tolist() == [[0.0, 0.5]]
    assert step_rewards("cost", costs, table_costs, fits).tolist() == [[-1.0, 0.0]]
