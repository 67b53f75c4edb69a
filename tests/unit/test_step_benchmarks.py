"""The benchmarks of steps report predicted, measured and simulated steps."""

import numpy as np
import pytest

from benchmarks import simulated, steps
from dlrm_sharded.datasets.task_sets import TRAINED_MAX_TABLE_SHARE, scaling_task, trained_task
from dlrm_sharded.task import GIB, Topology


def row(number: int, step_ms: list[float], predicted_ms: float, name: str = "dim"):
    return {
        "number": number,
        "sharders": [name],
        "step_ms": step_ms,
        "predicted_ms": predicted_ms,
        "composed_ms": predicted_ms,
    }


def test_a_wrong_choice_within_the_noise_is_a_tie():
    measured = np.array([10.0, 20.0, 10.0, 10.3, 10.0, 12.0])
    predicted = np.array([11.0, 21.0, 11.0, 10.0, 11.0, 10.0])
    numbers = np.array([0, 0, 1, 1, 2, 2])
    assert steps._picks(predicted, measured, numbers, margin=0.05) == (1, 1)


def test_the_report_has_the_error_of_every_prediction(capsys):
    steps.report([row(0, [10.0, 10.0], 11.0), row(0, [20.0, 20.0], 22.0)])
    text = capsys.readouterr().out
    assert "| from predicted cost | 10.0 | 10.0 | +10.0 | 1 and 0 ties of 1 |" in text


def test_a_prediction_is_corrected_by_other_cases_than_its_own(capsys):
    # the third case is another one, so its own error remains, and it spoils the other two
    steps.report([row(n, [10.0, 10.0], ms) for n, ms in enumerate((12.0, 12.0, 10.0))])
    text = capsys.readouterr().out
    factors = steps._factors(np.array([12.0, 12.0, 10.0]), np.full(3, 10.0), np.arange(3))
    assert factors == pytest.approx([1.2**-0.5, 1.2**-0.5, 1 / 1.2])
    assert "corrected by the other cases" in text


def test_simulations_are_compared_by_number_of_ranks(capsys):
    simulated.report(
        [
            {"ranks": ranks, "real_ms": 10.0, "simulated_ms": ms, "predicted_ms": 10.0, "noise": 0}
            for ranks, ms in ((2, 11.0), (2, 10.0 / 1.1), (4, 12.0))
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| 2 | 2 | 10.0 | +0.0 |") for line in lines)
    assert any(line.startswith("| 4 | 1 | 20.0 | +20.0 |") for line in lines)


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
