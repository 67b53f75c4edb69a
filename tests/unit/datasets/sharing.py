"""A dataset of three features, two of which look up one table."""

import torch
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import Split, profiled_table
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.tables import Table

FEATURES = (Table("seen", 50, 8, 3.0), Table("kind", 9, 4, 1.0), Table("bought", 50, 8, 2.0))


class Sharing(SyntheticDataset):
    """The features "seen" and "bought" have ids of the table "item"."""

    def __init__(self, batch_size: int = 12, num_dense: int = 13) -> None:
        sizes = {"num_train_batches": 3, "num_val_batches": 1, "num_dense": num_dense}
        super().__init__(FEATURES, batch_size=batch_size, **sizes)

    @property
    def tables(self) -> tuple[Table, ...]:  # type: ignore[override]
        _, kind, _ = super().tables
        ids = self.batch("train", 0, rank=0, world_size=1).sparse_features
        both = torch.cat([ids[name].values() for name in ("seen", "bought")])
        sizes = {"num_samples": self.batch_size, "features": ["seen", "bought"]}
        return kind, profiled_table("item", 50, 8, ids=both, **sizes)


class SharingWithWrongIds(Sharing):
    """Each of the features of "item" has an id beyond its rows, in the first training batch."""

    def batch(self, split: Split, index: int, *, rank: int, world_size: int) -> Batch:
        batch = super().batch(split, index, rank=rank, world_size=world_size)
        values, ends = batch.sparse_features.values(), batch.sparse_features.offset_per_key()
        if (split, index) == ("train", 0):
            values[ends[0]], values[ends[2]] = 50, 77
        return batch
