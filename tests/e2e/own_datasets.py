"""Datasets of a user's own, which fail."""

import os
import signal
from pathlib import Path
from typing import Any

from dlrm_sharded.datasets.base import Batch
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.files.errors import DataError


class OutOfRange(SyntheticDataset):
    """Its ids are larger than any table."""

    def batch(self, *arguments: Any, **options: Any) -> Batch:
        batch = super().batch(*arguments, **options)
        batch.sparse_features.values().add_(10**6)
        return batch


class NegativeOnRankOne(SyntheticDataset):
    """From its seventh batch on."""

    def batch(self, split: Any, index: int, *, rank: int, world_size: int) -> Batch:
        batch = super().batch(split, index, rank=rank, world_size=world_size)
        if rank == 1 and index > 5:
            batch.sparse_features.values()[0] = -7
        return batch


class FailingOnRankOne(SyntheticDataset):
    """As soon as it is made (`where` is init), or at its seventh batch (`where` is batch)."""

    def __init__(self, *arguments: Any, where: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._where = where
        if where == "init":
            self._fail()

    def batch(self, split: Any, index: int, *, rank: int, world_size: int) -> Batch:
        if self._where == "batch" and index > 5:
            self._fail()
        return super().batch(split, index, rank=rank, world_size=world_size)

    def _fail(self) -> None:
        if os.environ["RANK"] == "1":
            raise DataError("the file of rank one is cut")


class KillsRankZeroOnce(SyntheticDataset):
    """At its first batch, in the first attempt of the job."""

    def batch(self, split: Any, index: int, *, rank: int, world_size: int) -> Batch:
        if rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(split, index, rank=rank, world_size=world_size)


class KillsItselfOnce(SyntheticDataset):
    """When there is a checkpoint in the folder's run, unless there is a file `killed`."""

    def __init__(self, *arguments: Any, folder: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._folder = Path(folder)

    def batch(self, split: Any, index: int, *, rank: int, world_size: int) -> Batch:
        killed = self._folder / "killed"
        if not killed.exists() and any(self._folder.glob("run/checkpoints/step-*/manifest.json")):
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(split, index, rank=rank, world_size=world_size)
