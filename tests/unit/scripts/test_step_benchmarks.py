"""The benchmarks of steps report predicted, measured and simulated steps."""

import numpy as np
import pytest

from benchmarks import simulated, step_errors
from dlrm_sharded.datasets.task_sets import TRAINED_MAX_TABLE_SHARE, scaling_task, trained_task
from dlrm_sharded.plans.task import GIB, Topology
from dlrm_sharded.step.parts import PARTS


def row(number: int, step_ms: list[float], predicted_ms: float, *, cost_ms: float = 4.0):
    """Return a plan whose embeddings are predicted to take 4 ms, and their ids 1 ms."""
    return {
        "number": number,
        "sharders": ["dim"],
        "step_ms": step_ms,
        "predicted_ms": predicted_ms,
        "composed_ms": predicted_ms,
        "predicted_cost_ms": 4.0,
        "cost_ms": cost_ms,
        "predicted_input_dist_ms": 1.0,
        "input_dist_ms": 1.0,
    }


def test_a_wrong_choice_within_the_noise_is_a_tie():
    measured = np.array([10.0, 20.0, 10.0, 10.3, 10.0, 12.0])
    predicted = np.array([11.0, 21.0, 11.0, 10.0, 11.0, 10.0])
    numbers = np.array([0, 0, 1, 1, 2, 2])
    assert step_errors.picks(predicted, measured, numbers, margin=0.05) == (1, 1)


def test_the_report_has_the_error_of_every_prediction(capsys):
    step_errors.report([row(0, [10.0, 10.0], 11.0), row(0, [20.0, 20.0], 22.0)])
    text = capsys.readouterr().out
    assert "| predicted cost | 10.0 | 10.0 | +10.0 | 1 and 0 ties of 1 |" in text


def test_a_prediction_is_corrected_by_other_cases_than_its_own(capsys):
    # the third case is another one, so its own error remains, and it spoils the other two
    step_errors.report([row(n, [10.0, 10.0], ms) for n, ms in enumerate((12.0, 12.0, 10.0))])
    text = capsys.readouterr().out
    factors = step_errors.factors_of_others(
        np.array([12.0, 12.0, 10.0]), np.full(3, 10.0), np.arange(3)
    )
    assert factors == pytest.approx([1.2**-0.5, 1.2**-0.5, 1 / 1.2])
    assert "| measured cost, step corrected by them | " in text


def test_prices_are_corrected_by_the_embeddings_of_other_cases():
    rows = [row(0, [10.0], 10.0, cost_ms=8.0), row(1, [10.0], 10.0), row(2, [10.0], 10.0)]
    found = step_errors.with_prices_corrected(rows, np.arange(3))
    # the others of the first case were predicted right, those of the second one by 2 on the mean
    assert found == pytest.approx([10.0, 10.0 + 4 * (2**0.5 - 1), 10.0 + 4 * (2**0.5 - 1)])


def simulation(ranks: int, simulated_ms: float):
    parts = dict.fromkeys(PARTS, 0.0) | {"optimizer": simulated_ms}
    return {
        "case": "demo",
        "sharder": "dim",
        "ranks": ranks,
        "real_ms": [9.0, 10.0, 30.0],
        "simulated_ms": [simulated_ms] * 3,
        "predicted_ms": [10.0] * 3,
        "simulated_parts_ms": parts,
        "predicted_parts_ms": parts,
    }


def test_simulations_are_compared_by_number_of_ranks(capsys):
    simulated.report([simulation(2, 11.0), simulation(2, 10.0 / 1.1), simulation(4, 12.0)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| 2 | 2 | 10.0 | +0.0 |") for line in lines)
    assert any(line.startswith("| 4 | 1 | 20.0 | +20.0 |") for line in lines)
    assert "| 2 ranks, demo, dim: real | 10.0 |" in "\n".join(lines)


def test_the_noise_of_a_step_is_known_from_two_runs():
    assert simulated._noise([10.0, 11.0]) == pytest.approx(0.0597, abs=1e-4)
    assert simulated._noise([10.0]) == float("inf")


@pytest.mark.parametrize("number", range(6))
def test_trained_tasks_fit_their_ranks(number):
    topology = Topology(2, memory_bytes=GIB, compute_device="cpu")
    task = trained_task(number, topology)
    assert task == trained_task(number, topology)
    largest = max(4 * table.num_embeddings * table.embedding_dim for table in task.tables)
    assert largest <= TRAINED_MAX_TABLE_SHARE * GIB
    assert task.table_bytes < 0.7 * 2 * GIB
    assert sum(table.pooling_factor for table in task.tables) <= 101
    assert task.batch_size % 2 == 0


def test_scaling_tasks_have_the_size_that_is_asked_for():
    task = scaling_task(30, 4)
    assert (len(task.tables), task.topology.world_size) == (30, 4)
    assert scaling_task(30, 8).tables[0].embedding_dim == task.tables[0].embedding_dim
