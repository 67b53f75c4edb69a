"""Batches come in order, ahead of time, and from one thread at a time."""

import itertools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import BatchStream, page_locked
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.training.prefetch import Prefetcher

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)


def batch(number: int) -> Batch:
    ids = KeyedJaggedTensor(["t"], torch.tensor([0]), lengths=torch.tensor([1]))
    return Batch(torch.full((1, 1), float(number)), ids, torch.zeros(1))


def three_batches() -> SyntheticDataset:
    return SyntheticDataset(
        (Table("t", 10, 4, 2.0),), batch_size=4, num_train_batches=3, num_val_batches=0
    )


class Source(Iterator[Batch]):
    """Batches 0, 1, ...; notes which thread reads, and fails at a given one of them."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self._numbers = iter(range(count))
        self._fails_at = fails_at
        self.threads: list[int] = []
        self.read = threading.Semaphore(0)

    def __next__(self) -> Batch:
        number = next(self._numbers)
        self.threads.append(threading.get_ident())
        self.read.release()
        if number == self._fails_at:
            raise OSError(f"cannot read batch {number}")
        return batch(number)


def number_of(batch: Batch) -> int:
    return int(batch.dense_features)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_all_batches_in_order(depth):
    with Prefetcher(Source(5), depth=depth, device=CPU) as batches:
        assert [number_of(b) for b in batches] == [0, 1, 2, 3, 4]
        with pytest.raises(StopIteration):
            next(batches)


def test_reads_ahead():
    """Nothing was taken yet, and as many batches as the depth are read."""
    source = Source(5)
    with Prefetcher(source, depth=2, device=CPU) as batches:
        for _ in range(2):
            assert source.read.acquire(timeout=600)
        assert number_of(next(batches)) == 0
        assert source.read.acquire(timeout=600)
    assert threading.get_ident() not in source.threads
    assert len(source.threads) == 3


def test_without_a_thread():
    source = Source(2)
    with Prefetcher(source, depth=0, device=CPU) as batches:
        assert not source.threads
        next(batches)
    assert source.threads == [threading.get_ident()]


@pytest.mark.parametrize("depth", [0, 2])
def test_error_comes_with_its_batch(depth):
    with Prefetcher(Source(5, fails_at=2), depth=depth, device=CPU) as batches:
        assert [number_of(next(batches)) for _ in range(2)] == [0, 1]
        with pytest.raises(OSError, match="cannot read batch 2"):
            next(batches)


def test_one_thread_reads_a_dataset():
    train, val = Source(9), Source(3)
    with Prefetcher(train, depth=2, device=CPU) as batches:
        next(batches)
        other = Prefetcher(val, depth=2, device=CPU, shares_with=batches)
        assert [number_of(b) for b in other] == [0, 1, 2]
        assert number_of(next(batches)) == 1
    assert len({*train.threads, *val.threads}) == 1


def test_wait_is_measured():
    with Prefetcher(Source(5), depth=1, device=CPU) as batches:
        assert batches.take_wait_ms() == 0.0
        next(batches)
        assert batches.take_wait_ms() > 0.0
        assert batches.take_wait_ms() == 0.0


@pytest.mark.parametrize("depth", [0, 2])
def test_resumes_at_the_batch_of_a_step(depth):
    """A stream that is moved to the number of steps goes on as one that was not interrupted."""
    dataset = three_batches()

    def steps(first: int, count: int) -> list[list[int]]:
        stream = BatchStream(dataset, "train", shuffle_seed=1)
        stream.seek(first)
        endless = itertools.chain.from_iterable(itertools.repeat(stream))
        with Prefetcher(endless, depth=depth, device=CPU) as batches:
            taken = itertools.islice(batches, count)
            return [b.sparse_features.values().tolist() for b in taken]

    whole = steps(0, 8)
    assert steps(0, 4) + steps(4, 4) == whole


@pytest.fixture
def page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for page-locked memory, which needs a GPU: its batches, and the devices of threads."""
    batches: list[Batch] = []
    devices: list[torch.device] = []
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: batches.append(batch) or batch)
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda tensor: any(b.dense_features is tensor for b in batches)
    )
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return SimpleNamespace(batches=batches, devices=devices)


def test_thread_moves_batches_on_the_device_of_its_rank(page_locked_memory):
    with Prefetcher(Source(4), depth=2, device=CUDA) as batches:
        taken = list(batches)
    assert page_locked_memory.devices == [CUDA]
    assert [number_of(b) for b in page_locked_memory.batches] == [0, 1, 2, 3]
    assert len(taken) == 4


def test_cpu_has_no_page_locked_batches(page_locked_memory):
    with Prefetcher(Source(4), depth=2, device=CPU) as batches:
        list(batches)
    assert not page_locked_memory.batches
    assert not page_locked_memory.devices


def test_cached_batches_are_moved_once(page_locked_memory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    stream = BatchStream(three_batches(), "train")
    epochs = itertools.chain.from_iterable(itertools.repeat(stream, 4))
    with Prefetcher(epochs, depth=2, device=CUDA) as batches:
        assert len(list(batches)) == 12
    assert len(page_locked_memory.batches) == 3


def test_page_locked_batch_stays(page_locked_memory):
    first = page_locked(batch(0))
    assert page_locked(first) is first
    assert len(page_locked_memory.batches) == 1
