"""Finds the encoder of a run's training data, which checkpoints describe."""

from __future__ import annotations

from pathlib import Path

from dlrm_sharded.checkpoint.manifest import Manifest
from dlrm_sharded.datasets.conversion import ENCODER_FOLDER
from dlrm_sharded.datasets.encoder import encoder_digest
from dlrm_sharded.files.errors import DataError


def trained_encoder(manifest: Manifest, blocks_dir: str | None = None) -> Path | None:
    """Return the folder of the encoder of a training run; None if its data had no schema.

    Args:
        blocks_dir: folder of the run's converted data, if it has moved.

    Raises:
        DataError: the encoder does not exist there, or differs.
    """
    model = manifest.state.model or {}
    if model.get("encoder") is None:
        return None
    folder = Path(blocks_dir) / ENCODER_FOLDER if blocks_dir else Path(model["encoder"])
    if not folder.is_dir():
        raise DataError(
            f"the encoder of the training is missing: {folder} does not exist; set "
            "data.blocks_dir to the folder of the training's converted data"
        )
    if encoder_digest(folder) != model["encoder_digest"]:
        raise DataError(
            f"{folder} is not the encoder that {manifest.folder} was trained with: its data was "
            "converted again, or is other data; set data.blocks_dir to that of the training"
        )
    return folder
