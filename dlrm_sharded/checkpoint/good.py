"""Finds the checkpoint of a run to use: its best one, or else its newest usable one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from dlrm_sharded.checkpoint.folder import checkpoint_path, checkpoints, is_checkpoint
from dlrm_sharded.checkpoint.manifest import Manifest, check_parts, read_manifest
from dlrm_sharded.checkpoint.storage import check_finite
from dlrm_sharded.files.errors import CheckpointError
from dlrm_sharded.files.remote_files import Location

log = logging.getLogger(__name__)


def best_checkpoint(path: Location) -> Manifest:
    """Return the manifest of a checkpoint, or of the best one in a run's folder.

    The best one is the one that `trainer.keep_best` kept, or else the newest one. Unusable
    checkpoints in a run's folder are skipped with a warning.

    Raises:
        CheckpointError: the checkpoint is damaged or has weights that are not finite, or the folder
            has no usable one.
    """
    if is_checkpoint(path):
        return _checked(path)
    for candidate in _best_first(path, checkpoints(path)):
        try:
            return _checked(candidate)
        except CheckpointError as error:
            log.warning("skipped a checkpoint: %s", error)
    raise CheckpointError(f"{path} is neither a checkpoint nor a run's folder with a good one")


def _checked(path: Location) -> Manifest:
    manifest = read_manifest(path)
    check_parts(manifest)
    check_finite(manifest, weights_only=True)
    return manifest


def _best_first(run_dir: Location, newest_first: Sequence[Location]) -> list[Location]:
    """Return the checkpoints of a run, the best one first."""
    for path in newest_first:
        with suppress(CheckpointError):
            step = read_manifest(path).state.best_step
            best = None if step is None else checkpoint_path(run_dir, step)
            if best is not None and best not in newest_first:
                log.warning("the best checkpoint, %s, no longer exists; the newest is used", best)
            return sorted(newest_first, key=lambda path: path != best)
    return [*newest_first]
