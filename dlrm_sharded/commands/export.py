"""Write the weights of a checkpoint for serving: the command `dlrm-export`.

    dlrm-export runs/2026-11-20_09-45-08-481104/dim out=serving/model    newest good checkpoint
    dlrm-export runs/.../checkpoints/step-0000004000 out=serving/model   this one
    dlrm-export s3://bucket/run out=serving/model                        of an object store

The folder then has dense.safetensors, a safetensors file for each table, and
model.safetensors.index.json, whose `weight_map` names the file of each tensor. Large tables need
little memory, as they are copied a block of rows at a time. With model.json, and the folder encoder
if the data had a schema, `dlrm_sharded.load_exported` scores samples.
"""

from __future__ import annotations

import logging
import sys

from dlrm_sharded.checkpoint.folder import checkpoints, is_checkpoint
from dlrm_sharded.checkpoint.manifest import Manifest, check_parts, read_manifest
from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.files.errors import CheckpointError, ConfigError
from dlrm_sharded.files.json_files import folder_to_write
from dlrm_sharded.files.remote_files import Location, location

log = logging.getLogger(__name__)


def main() -> int:
    with exit_codes():
        names, keys = read_words(__doc__, ("out",), names="a checkpoint or a run's folder")
        if "out" not in keys or len(names) > 1:
            raise ConfigError("name one checkpoint or run's folder, and out, the folder to make")
        logging.basicConfig(format="%(message)s")
        from dlrm_sharded.checkpoint.export import export  # loads torch

        out = folder_to_write("out", keys["out"])
        manifest = _readable(location("the checkpoint", names[0]))
        done = export(manifest, out)
        print(
            f"{out}: {done.num_tables} tables and {done.num_dense} dense weights, "
            f"{done.size_bytes:,} B, of step {manifest.state.step:,} in {manifest.folder}"
        )
    return 0


def _readable(path: Location) -> Manifest:
    """Return the manifest of a checkpoint, or of the newest good one of a run's folder."""
    from dlrm_sharded.checkpoint.storage import check_finite  # loads torch

    is_named = is_checkpoint(path)
    for candidate in [path] if is_named else checkpoints(path):
        try:
            manifest = read_manifest(candidate)
            check_parts(manifest)
            check_finite(manifest, weights_only=True)
            return manifest
        except CheckpointError as error:
            if is_named:
                raise
            log.warning("a checkpoint is passed over: %s", error)
    raise CheckpointError(f"{path} is neither a checkpoint nor a run's folder with a good one")


if __name__ == "__main__":
    sys.exit(main())
