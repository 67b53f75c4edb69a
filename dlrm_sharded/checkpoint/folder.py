"""The checkpoints in a run's folder: their names, and which are removed or set aside."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar, cast

from dlrm_sharded.checkpoint.manifest import FILE_NAME, has_whole_parts, read_manifest
from dlrm_sharded.files.errors import CheckpointError, DamagedCheckpointError
from dlrm_sharded.files.json_files import sync_folder
from dlrm_sharded.files.remote_files import Location, RemotePath

log = logging.getLogger(__name__)

FOLDER_KEY = "trainer.checkpoint.folder"
FOLDER_NAME = "checkpoints"
P = TypeVar("P", bound=Location)
NAME = re.compile(r"step-(\d{10,})")
SET_ASIDE = "set-aside-"
"""Prefix of the names of checkpoints that no run reads, counts or removes."""


def checkpoint_path(run_dir: P, step: int) -> P:
    """Return the folder of the checkpoint at a step."""
    return cast(P, run_dir / FOLDER_NAME / f"step-{step:010}")


def partial_path(final: Location) -> Location:
    """Return the folder in which a checkpoint is written.

    In an object store, folders cannot be renamed: there, the manifest, which is written last, makes
    the final folder a checkpoint.
    """
    return final.with_name(f".{final.name}.partial") if isinstance(final, Path) else final


def checkpoints(run_dir: P) -> list[P]:
    """Return the checkpoints of a run, the newest first."""
    steps = {
        cast(P, path): int(match[1])
        for path in _entries(run_dir / FOLDER_NAME)
        if (match := NAME.fullmatch(path.name)) and not _is_partial(path)
    }
    return sorted(steps, key=steps.__getitem__, reverse=True)


def is_checkpoint(path: Location) -> bool:
    """Return whether a folder has a manifest."""
    return (path / FILE_NAME).is_file()


def make_partial(final: Location, *, run: str) -> None:
    """Make the empty folder in which a checkpoint is written, and remove leftovers.

    Raises:
        OSError: the disk refuses it, or has a checkpoint of another run there.
    """
    remove_partial(final.parent.parent)
    partial = partial_path(final)
    if isinstance(partial, Path):
        partial.mkdir(parents=True)
    elif is_checkpoint(partial):
        if _is_of(run, partial):
            delete(partial)
        else:
            set_aside(partial)
            if is_checkpoint(partial):
                raise FileExistsError(errno.EEXIST, "another run has it", str(partial))


def publish(final: Location, *, run: str) -> None:
    """Rename a complete folder to its final name, durably.

    A checkpoint of this run with that name is replaced; anything else with that name is set aside.

    Raises:
        OSError: the disk refuses it.
    """
    partial = partial_path(final)
    if isinstance(final, RemotePath) or isinstance(partial, RemotePath):
        return
    replaced = None
    if os.path.lexists(final):
        if _is_of(run, final):
            replaced = _removed_path(final)
            delete(replaced)
            final.rename(replaced)
        else:
            set_aside(final)
    try:
        partial.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    if replaced is not None:  # only now: it may be the only checkpoint, and deleting is slow
        with contextlib.suppress(OSError):
            delete(replaced)
    sync_folder(final.parent)


def keep_newest(
    newest: Location, keep: int, *, run: str, known: set[Location], best_step: int | None = None
) -> None:
    """Remove all checkpoints of a run except the newest ones and the best one.

    Only complete ones count. Checkpoints of later steps are left alone: the run skipped them
    because they were damaged or belong to another run. So are earlier checkpoints of other runs.

    Args:
        newest: the checkpoint that was written last.
        keep: number of complete checkpoints to keep.
        known: checkpoints of the run that it has written or checked before, so they need no check.
        best_step: step of the best checkpoint; None for none.
    """
    num_kept, run_dir = 0, newest.parent.parent
    best = None if best_step is None else checkpoint_path(run_dir, best_step)
    of_all_steps = checkpoints(run_dir)
    for path in itertools.dropwhile(lambda path: path != newest, of_all_steps):
        if path not in known:
            try:
                manifest = read_manifest(path)
            except DamagedCheckpointError:
                if num_kept == keep:
                    set_aside(path)
                continue
            except CheckpointError:
                continue
            if manifest.state.run != run:
                continue
            # Checksums would take too long here. They are verified when a run resumes.
            if has_whole_parts(manifest):
                known.add(path)
        if num_kept == keep:
            if path != best:
                known.discard(path)
                remove(path)
        elif path in known:
            num_kept += 1


def _is_of(run: str, path: Location) -> bool:
    try:
        return read_manifest(path).state.run == run
    except CheckpointError:
        return False


def set_aside(path: Location) -> None:
    """Rename an unusable checkpoint to an unused name that is not that of one, if possible."""
    for number in itertools.count(1):
        suffix = "" if number == 1 else f"-{number}"
        free = path.with_name(f"{SET_ASIDE}{path.name}{suffix}")
        if not (os.path.lexists(free) if isinstance(free, Path) else free.exists()):
            break
    try:
        path.rename(str(free))
    except OSError as error:
        log.warning("%s cannot be renamed: %s", path, error.strerror)
    else:
        log.warning("%s is unusable and was renamed to %s", path, free.name)


def remove_partial(run_dir: Location) -> None:
    """Remove what an interrupted save or removal left behind, if possible."""
    with contextlib.suppress(OSError):
        for path in _entries(run_dir / FOLDER_NAME):
            if _is_partial(path):
                with contextlib.suppress(OSError):
                    delete(path)


def remove(path: Location) -> None:
    """Remove a checkpoint, if possible; it immediately stops being one."""
    with contextlib.suppress(OSError):
        if isinstance(path, Path):
            hidden = _removed_path(path)
            delete(hidden)
            path = path.rename(hidden)
        delete(path)


def _entries(folder: Location) -> Iterable[Location]:
    return folder.iterdir() if isinstance(folder, RemotePath) or folder.is_dir() else ()


def _is_partial(path: Location) -> bool:
    """Return whether a checkpoint is partly written or removed."""
    if isinstance(path, Path):
        return path.name.startswith(".step-")
    return NAME.fullmatch(path.name) is not None and not is_checkpoint(path)


def _removed_path(path: Path) -> Path:
    """Return the name of a checkpoint that is being removed."""
    return path.with_name(f".{path.name}.removed")


def delete(path: Location) -> None:
    """Delete a folder with its content, a file, or a link (but not its target)."""
    if isinstance(path, RemotePath):
        (path / FILE_NAME).delete()  # it stops being a checkpoint before it loses a part
        path.delete()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
