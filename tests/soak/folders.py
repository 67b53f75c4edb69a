"""Folders for the runs of a soak test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_of(kept: Path | None) -> Iterator[Path]:
    """Yield the folder, or without one a new folder that is removed after the block."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="soak_") as name:
        yield Path(name)
