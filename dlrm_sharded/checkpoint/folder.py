"""The checkpoints in a run's folder: their names, which are removed, and which are set aside."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
from pathlib import Path

from dlrm_sharded.checkpoint.manifest import FILE_NAME, has_whole_parts, read_manifest
from dlrm_sharded.files.errors import CheckpointError, DamagedCheckpointError
from dlrm_sharded.files.json_files import sync_folder

log = logging.getLogger(__name__)

FOLDER_NAME = "checkpoints"
NAME = re.compile(r"step-(\d{10,})")
SET_ASIDE = "set-aside-"
"""Beginning of the names of checkpoints that no run reads, counts or removes."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint at a step."""
    return run_dir / FOLDER_NAME / f"step-{step:010}"


def partial_path(final: Path) -> Path:
    """Return the folder in which a checkpoint is written."""
    return final.with_name(f".{final.name}.partial")


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest first."""
    folder = run_dir / FOLDER_NAME
    steps = {
        path: int(match[1])
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := NAME.fullmatch(path.name))
    }
    return sorted(steps, key=steps.__getitem__, reverse=True)


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has a manifest."""
    return (path / FILE_NAME).is_file()


def publish(partial: Path, final: Path, *, run: str) -> None:
    """Rename a complete folder to its final name, durably.

    A checkpoint of this run that has the name is replaced, anything else that has it is set aside.

    Raises:
        OSError: the disk refuses it.
    """
    replaced = None
    if os.path.lexists(final):
        if _is_of(run, final):
            replaced = _removed_path(final)
            _delete(replaced)
            final.rename(replaced)
        else:
            _set_aside(final)
    try:
        partial.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    if replaced is not None:  # only now, as it may be the only checkpoint, and take long
        with contextlib.suppress(OSError):
            _delete(replaced)
    sync_folder(final.parent)


def keep_newest(newest: Path, keep: int, *, run: str, known: set[Path]) -> None:
    """Remove the checkpoints of a run before its newest ones.

    Only whole ones count. Steps above the newest one are left alone: the run has passed them over,
    as they were damaged or of another run. So are those of other runs below it.

    Args:
        newest: checkpoint that was written last.
        keep: number of whole checkpoints that stay.
        known: checkpoints of the run that need no check, as it has written or checked them before.
    """
    num_kept = 0
    of_all_steps = checkpoints(newest.parent.parent)
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
            # Checksums would take too long here. They are verified when a run goes on.
            if has_whole_parts(manifest):
                known.add(path)
        if num_kept == keep:
            known.discard(path)
            remove(path)
        elif path in known:
            num_kept += 1


def set_aside(path: Path) -> None:
    """Rename a checkpoint that a run has passed over, so that it is none any more, if possible."""
    try:
        _set_aside(path)
    except OSError as error:
        log.warning("%s cannot be set aside: %s", path, error.strerror)


def _is_of(run: str, path: Path) -> bool:
    try:
        return read_manifest(path).state.run == run
    except CheckpointError:
        return False


def _set_aside(path: Path) -> None:
    """Rename a checkpoint to a free name that is not that of a checkpoint."""
    for number in itertools.count(1):
        suffix = "" if number == 1 else f"-{number}"
        free = path.with_name(f"{SET_ASIDE}{path.name}{suffix}")
        if not os.path.lexists(free):
            break
    path.rename(free)
    log.warning("%s is set aside as %s; remove it when nothing in it is needed", path, free.name)


def remove_partial(run_dir: Path) -> None:
    """Remove what an interrupted save or removal has left."""
    folder = run_dir / FOLDER_NAME
    for path in folder.glob(".step-*") if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            _delete(path)


def remove(path: Path) -> None:
    """Remove a checkpoint; it stops being one at once."""
    hidden = _removed_path(path)
    with contextlib.suppress(OSError):
        _delete(hidden)
        path.rename(hidden)
        _delete(hidden)


def _removed_path(path: Path) -> Path:
    """Return the name of a checkpoint that is being removed."""
    return path.with_name(f".{path.name}.removed")


def _delete(path: Path) -> None:
    """Delete a folder with all that is in it, or a file, or a link but not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
