"""What the batches of datasets hold."""

from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import Dataset, Split


def whole_batch(dataset: Dataset, index: int = 0, split: Split = "train") -> Batch:
    return dataset.batch(split, index, rank=0, world_size=1)


def ids_of(batch: Batch) -> list[list[list[int]]]:
    """Ids by table and sample."""
    jagged = batch.sparse_features.to_dict()
    return [
        [ids.tolist() for ids in jagged[key].values().split(jagged[key].lengths().tolist())]
        for key in batch.sparse_features.keys()  # noqa: SIM118
    ]
