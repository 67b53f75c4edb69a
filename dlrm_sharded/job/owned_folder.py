"""The folder of a run, which one job owns at a time, and the location of its checkpoints."""

from __future__ import annotations

import dataclasses
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dlrm_sharded.checkpoint.folder import FOLDER_KEY, delete
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import write_durably
from dlrm_sharded.files.remote_files import Location, seen_in_time
from dlrm_sharded.job.settings import JobSettings
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.runs.owner import claim
from dlrm_sharded.runs.remote_copy import RemoteCopy


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that this job owns.

    Args:
        check_owner: called by rank 0 before it writes there; raises LostFolderError if another job
            has taken the folder over.
        copy: the folder's copy in an object store, which has the checkpoints; None for no copy.
        host: the host that has the folder, if others may lack it; None if all hosts see it.
    """

    path: Path
    check_owner: Callable[[], None]
    copy: RemoteCopy | None = None
    host: str | None = None

    @property
    def checkpoints_in(self) -> Location:
        """The folder with the checkpoints: the run's folder, or its copy."""
        return self.path if self.copy is None else self.copy.home

    def push(self) -> None:
        """Copy changed files of the folder to its copy, if it has one; rank 0 calls this.

        Raises:
            OSError: a file cannot be copied.
        """
        if self.copy is not None:
            self.copy.push()


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


def with_checkpoints(folder: RunFolder, settings: JobSettings, rank: Rank) -> RunFolder:
    """Return the folder with the location of its checkpoints, and try if all ranks can write there.

    Raises:
        ConfigError: the run writes checkpoints, but some hosts cannot; the message names them.
    """
    config = settings.trainer.checkpoint
    home = None if config is None else config.home
    copy = None if home is None else RemoteCopy(folder.path, home)
    folder = dataclasses.replace(folder, copy=copy)
    writes = config is not None and config.is_enabled and not settings.dry_run
    apart = _hosts_apart(folder.checkpoints_in, rank) if writes or home is None else {}
    with all_or_none():
        if apart and writes:
            named = ", ".join(f"{host} ({problem})" for host, problem in apart.items())
            raise ConfigError(
                f"not all hosts can write to {folder.path}, where checkpoints have parts of all "
                f"ranks: {named}. Set hydra.run.dir to a folder that all hosts share, "
                f"set {FOLDER_KEY}=s3://BUCKET/RUN, or train without checkpoints: "
                "trainer.checkpoint.every_s=null"
                if home is None
                else f"{FOLDER_KEY} is {str(home)!r}, where not all can write: {named}"
            )
    hosts = [""] * rank.world_size
    dist.all_gather_object(hosts, socket.gethostname())
    is_elsewhere = len({*hosts}) > 1 and (apart or home is not None)
    return dataclasses.replace(folder, host=hosts[0] if is_elsewhere else None)


def _hosts_apart(folder: Location, rank: Rank) -> dict[str, str]:
    """Return why hosts cannot write where rank 0 does; a collective of all ranks.

    Each rank writes a file into a new folder of rank 0, which does not exist on other disks.
    """
    if rank.world_size == 1 and isinstance(folder, Path):
        return {}
    probe = folder / on_rank_zero(lambda: f".seen-{uuid.uuid4().hex}")
    problem = None
    try:
        if isinstance(probe, Path):
            if rank.is_zero:
                probe.mkdir()
            seen_in_time(probe.is_dir)
        write_durably(probe / str(rank.rank), [b"seen"])
    except OSError as error:
        problem = error.strerror
    found: list[tuple[str, str | None]] = [("", None)] * rank.world_size
    dist.all_gather_object(found, (socket.gethostname(), problem))
    if rank.is_zero:
        with suppress(OSError):
            delete(probe)
    return {host: problem for host, problem in found if problem is not None}
