"""Batches are read over the whole training, to know how long reading takes."""

import time

import pytest

from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.read_batches import NUM_READ, read_batches
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.tables import Table

SLOW_S = 0.02


class PartlySlow(SyntheticDataset):
    """The second half of the batches takes long, as if it were not in a cache."""

    def __init__(self, num_batches: int) -> None:
        tables = [Table("t", 100, 4, 1.0)]
        super().__init__(tables, batch_size=4, num_train_batches=num_batches, num_val_batches=0)
        self.indices: list[int] = []

    def batch(self, split, index, *, rank, world_size):
        self.indices.append(index)
        if 2 * index >= self.num_batches(split):
            time.sleep(SLOW_S)
        return super().batch(split, index, rank=rank, world_size=world_size)


def test_the_mean_is_that_of_the_whole_training():
    data = PartlySlow(200)
    batches, data_ms = read_batches(
        BatchStream(data, "train"), first_step=0, num_steps=200, budget_s=60, num_kept=3
    )
    assert len(batches) == 3
    assert len(data.indices) == len(set(data.indices)) == 1 + NUM_READ
    assert (min(data.indices), max(data.indices)) == (0, 199)
    assert data_ms >= 1e3 * SLOW_S * (NUM_READ // 2 - 1) / NUM_READ


def test_it_ends_with_the_budget():
    data = PartlySlow(200)
    read_batches(BatchStream(data, "train"), first_step=150, num_steps=50, budget_s=0, num_kept=9)
    assert len(data.indices) == 2
    assert min(data.indices) >= 150


@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_few_steps(num_steps):
    data = PartlySlow(10)
    batches, data_ms = read_batches(
        BatchStream(data, "train"), first_step=3, num_steps=num_steps, budget_s=60, num_kept=9
    )
    num_read = max(2, num_steps)  # the first one may make others, and does not count
    assert sorted(data.indices) == list(range(3, 3 + num_read))
    assert len(batches) == num_read
    assert data_ms > 0
