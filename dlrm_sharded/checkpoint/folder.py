"""The checkpoints in a run's folder: their names, which are complete, and which are removed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

from dlrm_sharded.checkpoint.manifest import FILE_NAME

log = logging.getLogger(__name__)

FOLDER_NAME = "checkpoints"
NAME = re.compile(r"step-(\d{10,})")


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


def publish(partial: Path, final: Path) -> None:
    """Rename a complete folder to its final name, durably.

    Raises:
        OSError: the disk refuses it.
    """
    if final.exists():  # a damaged one that was passed over
        remove(final)
    partial.rename(final)
    parent = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def keep_newest(run_dir: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for path in checkpoints(run_dir)[keep:]:
        remove(path)


def remove_partial(run_dir: Path) -> None:
    """Remove what an interrupted save or removal has left."""
    folder = run_dir / FOLDER_NAME
    for path in folder.glob(".step-*") if folder.is_dir() else ():
        shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; it stops being one at once."""
    hidden = path.with_name(f".{path.name}.removed")
    with contextlib.suppress(OSError):
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden)
