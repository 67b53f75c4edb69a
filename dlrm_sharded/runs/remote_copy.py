"""The copy of a run's files in an object store, next to its checkpoints there."""

from __future__ import annotations

from pathlib import Path

from dlrm_sharded.checkpoint.folder import FOLDER_NAME
from dlrm_sharded.files.remote_files import RemotePath

RUN_FILE = "run.json"
"""File in a run's folder with the run's id and its starts."""

NOT_COPIED = (".owner", f"{FOLDER_NAME}/")
"""Prefixes of names: a claim belongs to one host, and checkpoints are written to the store."""


class RemoteCopy:
    """Copies changes in a run's folder to the store, and back to hosts that do not have them.

    Args:
        folder: folder of the run, on the host of rank 0.
    """

    def __init__(self, folder: Path, home: RemotePath) -> None:
        self._folder = folder
        self.home = home
        self._copied: dict[str, tuple[int, int]] = {}

    def push(self) -> None:
        """Upload files that are new or have changed since the last call.

        Raises:
            OSError: a file cannot be read or uploaded.
        """
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if name.startswith(NOT_COPIED) or name.endswith(".tmp") or not path.is_file():
                continue
            found = path.stat()
            if self._copied.get(name) != (found.st_size, found.st_mtime_ns):
                (self.home / name).write_bytes(path.read_bytes())
                self._copied[name] = (found.st_size, found.st_mtime_ns)

    def pull(self) -> None:
        """Download the files of an interrupted run, unless its last start was in this folder.

        Logs and files in subfolders, such as Hydra's, are not downloaded.

        Raises:
            OSError: a file cannot be downloaded or written.
        """
        sizes = self.home.entries()
        here = self._folder / RUN_FILE
        if RUN_FILE not in sizes or (
            here.is_file() and here.read_bytes() == (self.home / RUN_FILE).read_bytes()
        ):
            return
        for name, size in sizes.items():
            if size is not None and not name.endswith(".log"):
                (self._folder / name).write_bytes((self.home / name).read_bytes())
