"""Builds a folder completely or not at all, and only once for all processes that need it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.line_file import holder

log = logging.getLogger(__name__)


def build_once(
    folder: Path, *, is_complete: Callable[[Path], bool], build: Callable[[Path], None]
) -> None:
    """Make `folder` with `build`, unless it is complete already.

    The work is done in `<folder>.partial`, which is renamed at the end. `<folder>.lock` makes other
    processes wait. The system releases the lock of a killed process, and the next process finds the
    killed one's partial folder. After an error, nothing is left.

    Args:
        folder: must not exist, or be empty, or be complete.
        is_complete: returns whether a folder is a complete result.
        build: fills a folder, which may contain files that a killed process left.

    Raises:
        DataError: `folder` holds something else.
    """
    if is_complete(folder):
        return
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DataError(
            f"{folder} is not empty and not a complete dataset; remove it, or name another "
            "folder for the converted data"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial")
    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.info("waiting for %s, which makes %s", holder(Path(lock.lock_file)), folder)
        lock.acquire()
    try:
        if not is_complete(folder):  # another process may have finished while this one waited
            partial.mkdir(exist_ok=True)
            try:
                build(partial)
            except Exception:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            partial.replace(folder)
    except OSError as error:
        if error.filename is not None:  # the message names the file
            raise
        raise DataError(
            f"cannot write {folder}: {error.strerror or error}; nothing is left of it; free space "
            "there, or name a folder on another disk (data.blocks_dir, data.path, out)"
        ) from error
    finally:
        # a process that has this file open sees that it is gone and makes a new one
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
