"""The folder of a run, which one job owns at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlrm_sharded.ranks.agreement import all_or_none
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.runs.owner import claim


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that this job owns.

    Args:
        check_owner: what rank 0 calls before it writes there: LostFolderError if another job has
            taken over.
    """

    path: Path
    check_owner: Callable[[], None]


@contextmanager
def owned_folder(path: Path, rank: Rank) -> Iterator[RunFolder]:
    """Own a run's folder within a block that all ranks enter.

    Raises:
        ConfigError: another job owns the folder; all ranks raise it.
    """
    with all_or_none():
        owner = claim(path) if rank.is_zero else None
    try:
        yield RunFolder(path, owner.check if owner is not None else lambda: None)
    finally:
        if owner is not None:
            owner.release()
