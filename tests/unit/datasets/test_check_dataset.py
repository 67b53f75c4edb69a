"""check_dataset accepts a correct dataset and names what is wrong with others."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import Split
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.testing import check_dataset
from tests.unit.datasets.sharing import Sharing, SharingWithWrongIds

NOISE = itertools.count()


class Correct(SyntheticDataset):
    def __init__(self) -> None:
        tables = (Table("a", 50, 4, 2.5), Table("b", 9, 8, 1.0))
        super().__init__(
            tables, batch_size=12, num_train_batches=3, num_val_batches=1, cache_batches=0
        )


class WithoutProfile(Correct):
    tables = (Table("a", 50, 4, 2.5), Table("b", 9, 8, 1.0))  # type: ignore[assignment]


class OtherTables(Correct):
    num_made = 0

    def __init__(self) -> None:
        super().__init__()
        OtherTables.num_made += 1
        self._order = 1 if OtherTables.num_made % 2 else -1

    @property
    def tables(self) -> tuple[Table, ...]:  # type: ignore[override]
        return super().tables[:: self._order]


class WithoutTraining(Correct):
    def num_batches(self, split: Split) -> int:
        return 0 if split == "train" else super().num_batches(split)


class SameShareForAll(Correct):
    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        return super().batch(split, index, rank=0, world_size=world_size)


class WholeBatchForAll(Correct):
    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        return super().batch(split, index, rank=0, world_size=1)


def changed(change: Callable[[Batch], object]) -> type[Correct]:
    """The correct dataset, whose batches are changed."""

    class Changed(Correct):
        def batch(self, *arguments: Any, **options: Any) -> Batch:
            batch = super().batch(*arguments, **options)
            change(batch)
            return batch

    return Changed


def too_few_dense(batch: Batch) -> None:
    batch.dense_features = batch.dense_features[:, 1:]


def integer_labels(batch: Batch) -> None:
    batch.labels = batch.labels.long()


def test_a_correct_dataset():
    check_dataset(Correct, world_sizes=(1, 2, 3, 4, 5))


def test_features_that_share_a_table():
    kind, item = Sharing().tables
    assert (item.features, item.num_features, item.pooling_factor) == (("seen", "bought"), 2, 5.0)
    assert kind.feature_names == ("kind",)
    check_dataset(Sharing)
    with pytest.raises(DataError, match="'seen' of table 'item' has ids beyond its 50 rows"):
        check_dataset(SharingWithWrongIds)


class WithAnotherFeature(Sharing):
    @property
    def tables(self) -> tuple[Table, ...]:  # type: ignore[override]
        kind, item = super().tables
        return kind, dataclasses.replace(item, features=("seen", "kind"))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (WithoutProfile, "'a' has no reuse histogram"),
        (OtherTables, "not the same every time"),
        (WithoutTraining, "no batch for training"),
        (SameShareForAll, "shares of 2 ranks are not train batch"),
        (WholeBatchForAll, "dense features are"),
        (changed(lambda batch: batch.dense_features.add_(next(NOISE))), "is not repeatable"),
        (changed(lambda batch: torch.rand(1)), "used a global random state"),
        (changed(integer_labels), "int64"),
        (changed(too_few_dense), "dense features are"),
    ],
    ids=str,
)
def test_faults(dataset, message):
    with pytest.raises(AssertionError, match=message):
        check_dataset(dataset)


def test_features_that_no_table_has():
    message = r"features \['bought', 'kind', 'seen'\], the tables have \['kind', 'kind', 'seen'\]"
    with pytest.raises(DataError, match=message):
        check_dataset(WithAnotherFeature)


def test_ids_that_no_table_has():
    with pytest.raises(
        DataError, match=r"of table 'a' has ids beyond its 50 rows \(29, up to 98\)"
    ):
        check_dataset(changed(lambda batch: batch.sparse_features.values().add_(50)))
