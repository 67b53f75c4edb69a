"""The stream of batches: epochs, order, resuming; and the profile of a table's ids."""

from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import SPLITS, BatchStream, Split, profiled_table, reuse_histogram
from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table


class NumberedBatches:
    """A dataset whose batches have the dense features (index, rank, world_size)."""

    batch_size = 12
    num_dense = 3
    label = 1.0
    tables: tuple[Table, ...] = ()

    def __init__(self, *, train: int = 7, val: int = 3) -> None:
        self._num_batches = {"train": train, "val": val}

    def num_batches(self, split: Split) -> int:
        return self._num_batches[split]

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        assert 0 <= index < self._num_batches[split]
        nothing = torch.zeros(0, dtype=torch.int64)
        return Batch(
            torch.tensor([[index, rank, world_size]]),
            KeyedJaggedTensor(["t"], nothing, lengths=torch.zeros(1, dtype=torch.int32)),
            torch.tensor([self.label]),
        )


def indices(batches: Iterable[Batch]) -> list[int]:
    return [int(batch.dense_features[0, 0]) for batch in batches]


def epochs(stream: BatchStream, count: int) -> list[list[int]]:
    return [indices(stream) for _ in range(count)]


@pytest.mark.parametrize("split", SPLITS)
def test_epochs_in_order(split):
    dataset = NumberedBatches()
    stream = BatchStream(dataset, split)
    in_order = list(range(dataset.num_batches(split)))
    assert len(stream) == len(in_order)
    assert epochs(stream, 3) == [in_order] * 3


def test_shuffled_epochs_are_permutations():
    dataset = NumberedBatches(train=20)
    found = epochs(BatchStream(dataset, "train", shuffle_seed=1), 3)
    assert [sorted(epoch) for epoch in found] == [list(range(20))] * 3
    others = [list(range(20)), *epochs(BatchStream(dataset, "train", shuffle_seed=2), 1)]
    assert len({tuple(epoch) for epoch in [*found, *others]}) == 5
    assert epochs(BatchStream(dataset, "train", shuffle_seed=1), 3) == found


def test_ranks_see_the_same_batches():
    streams = [
        BatchStream(NumberedBatches(), "train", rank=rank, world_size=3, shuffle_seed=0)
        for rank in range(3)
    ]
    for shares in zip(*streams, strict=True):
        assert len(set(indices(shares))) == 1
        places = [share.dense_features[0, 1:].tolist() for share in shares]
        assert places == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.parametrize("seed", [None, 5], ids=["in_order", "shuffled"])
@pytest.mark.parametrize("num_done", [0, 1, 3, 7, 8, 13, 14, 17])
def test_seeks_any_batch(num_done, seed):
    whole = [
        index
        for epoch in epochs(BatchStream(NumberedBatches(), "train", shuffle_seed=seed), 4)
        for index in epoch
    ]
    stream = BatchStream(NumberedBatches(), "train", shuffle_seed=seed)
    next(stream)
    stream.seek(num_done)
    rest = [index for epoch in epochs(stream, 4 - num_done // 7) for index in epoch]
    assert rest == whole[num_done:]


def test_rest_of_the_epoch_after_seeking():
    """The first loop yields the rest of the epoch, the next one a whole epoch again."""
    stream = BatchStream(NumberedBatches(), "train")
    stream.seek(7 + 5)
    assert epochs(stream, 2) == [[5, 6], list(range(7))]


@pytest.mark.parametrize("world_size", [5, 24])
def test_ranks_must_share_a_batch_evenly(world_size):
    with pytest.raises(ConfigError, match=f"batch_size is 12; .*multiple of the {world_size} rank"):
        BatchStream(NumberedBatches(), "train", world_size=world_size)


def plain_histogram(ids: list[int]) -> list[float]:
    """Bin k holds ids that are used over 2^(k-1) and up to 2^k times; the last one has no end."""
    uses = Counter(ids).values()
    shares = [0.0] * NUM_REUSE_BINS
    for count in uses:
        fitting = [k for k in range(NUM_REUSE_BINS - 1) if count <= 2**k]
        shares[fitting[0] if fitting else NUM_REUSE_BINS - 1] += 1 / len(uses)
    return shares


@pytest.mark.parametrize(
    "uses",
    [
        [1],
        [1, 2, 3, 4, 5, 8, 9, 16, 17],
        [count for k in range(3, 16) for count in (2**k - 1, 2**k, 2**k + 1)],
        [32_768, 32_769, 65_536, 65_537, 200_000],
        [1] * 50 + [7],
        [],
    ],
    ids=["one_id", "small", "around_powers", "last_bin", "skewed", "none"],
)
def test_reuse_histogram(uses):
    counts = torch.tensor(uses, dtype=torch.int64)
    ids = torch.arange(len(uses)).mul(37).repeat_interleave(counts)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    histogram = reuse_histogram(ids)
    assert histogram == pytest.approx(plain_histogram(ids.tolist()))
    assert sum(histogram) == pytest.approx(1.0 if uses else 0.0)


def test_profile_is_of_the_ids():
    ids = torch.tensor([3, 3, 0, 9, 3, 1])
    table = profiled_table("t", 10, 8, ids=ids, num_samples=4)
    assert table.pooling_factor == 1.5
    assert table.reuse_histogram == reuse_histogram(ids)
    assert (table.name, table.num_embeddings, table.embedding_dim) == ("t", 10, 8)


@pytest.mark.parametrize("bounds", ["warn", "ignore"])
def test_a_sample_with_other_ids_than_its_dataset_says_ends_the_run(bounds):
    """Ranks send as many ids as they know of, so other ranks would take ids of another feature."""

    class WrongLengths(NumberedBatches):
        ids_per_sample: ClassVar = {"t": 3}

    stream = BatchStream(WrongLengths(), "train", bounds=bounds)
    message = "of 1 samples has 0 ids of feature 't', and the dataset says that each sample has 3"
    with pytest.raises(DataError, match=message):
        next(stream)


@pytest.mark.parametrize("label", [-1.0, 77.0, float("nan")])
def test_a_label_that_is_no_probability_ends_the_run(label):
    """Its loss has no least value, so a run would go on with ever lower ones."""
    dataset = NumberedBatches()
    dataset.label = label
    with pytest.raises(DataError, match=f"labels from {label:g} to .* which must be 0 or 1"):
        next(BatchStream(dataset, "train"))
