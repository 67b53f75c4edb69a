"""Datasets of a user's own, which fail."""

import os
import signal
import time
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
    """When the folder has such a file, unless it has a file `killed`."""

    def __init__(self, *args: Any, folder: str, file: str, number: int = 9, **options: Any) -> None:
        super().__init__(*args, **options)
        self._folder, self._file, self._number = Path(folder), file, number

    def batch(self, *arguments: Any, **options: Any) -> Batch:
        killed = self._folder / "killed"
        if not killed.exists() and any(self._folder.glob(self._file)):
            killed.touch()
            os.kill(os.getpid(), self._number)
        return super().batch(*arguments, **options)


class Slow(SyntheticDataset):
    """Each batch takes 0.1 s or more, until there is a file `go` in the folder."""

    def __init__(self, *arguments: Any, folder: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._go = Path(folder) / "go"

    def batch(self, *arguments: Any, **options: Any) -> Batch:
        time.sleep(0 if self._go.exists() else 0.1)
        return super().batch(*arguments, **options)


def settings_of(dataset: type, **options: object) -> list[str]:
    added = (f"+data.{key}={value}" for key, value in options.items())
    return [f"data._target_={dataset.__module__}.{dataset.__name__}", *added]
