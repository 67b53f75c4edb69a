"""Builds a folder that is there whole or not at all, once, however many processes ask for it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from dlrm_sharded.errors import DataError

log = logging.getLogger(__name__)

LOCK = ".lock"


def build_once(
    folder: Path, *, is_complete: Callable[[Path], bool], build: Callable[[Path], None]
) -> None:
    """Make `folder` with `build`, unless it is complete already.

    The work is done in `<folder>.partial`, which is renamed at the end. A lock in it lets other
    processes wait; the system drops the lock of a killed process, and what it left is discarded.

    Args:
        folder: must not exist, or be empty, or be complete.
        is_complete: tells whether a folder is a whole result.
        build: fills the empty folder that it is given.

    Raises:
        DataError: `folder` holds something else.
    """
    partial = folder.with_name(folder.name + ".partial")
    while not is_complete(folder):
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise DataError(
                f"{folder} is not empty and not a complete dataset; remove it, or name another "
                "folder for the converted data"
            )
        lock = _lock(partial)
        if lock is None:
            continue
        with lock:
            _clear(partial)
            try:
                if not is_complete(folder):  # someone may have finished just before the lock
                    build(partial)
                    partial.replace(folder)
                    (folder / LOCK).unlink()
            finally:
                _remove(partial)


def _lock(partial: Path) -> IO[bytes] | None:
    """The locked lock file of `partial`; None if the folder was renamed or removed meanwhile."""
    partial.mkdir(parents=True, exist_ok=True)
    path = partial / LOCK
    try:
        file = path.open("wb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for the process that is making %s", partial)
        fcntl.flock(file, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
    file.close()
    return None


def _clear(partial: Path) -> None:
    for entry in partial.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _remove(partial: Path) -> None:
    if not partial.is_dir():
        return
    _clear(partial)
    (partial / LOCK).unlink()
    with contextlib.suppress(OSError):  # the next process has put its lock there already
        partial.rmdir()
