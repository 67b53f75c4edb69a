"""Write the weights of a checkpoint for serving: the command `dlrm-export`.

    dlrm-export runs/2026-11-20_09-45-08-481104/dim out=serving/model    best or newest one
    dlrm-export runs/.../checkpoints/step-0000004000 out=serving/model   this one
    dlrm-export s3://bucket/run out=serving/model                        of an object store

For a run's folder, it takes the best checkpoint if trainer.keep_best kept one, or else the newest
usable one. The folder `out` gets dense.safetensors, a safetensors file for each table, and
model.safetensors.index.json, whose `weight_map` names the file of each tensor. Large tables need
little memory, because they are copied a block of rows at a time. With model.json, and the folder
encoder if the data had a schema, `dlrm_sharded.load_exported` scores samples.
data.blocks_dir=FOLDER names the converted training data if it has moved; data.blocks_dir=none
exports without the encoder.
"""

from __future__ import annotations

import logging

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import folder_to_write
from dlrm_sharded.files.remote_files import location


def main() -> None:
    with exit_codes():
        names, keys = read_words(
            __doc__, ("out", "data.blocks_dir"), names="a checkpoint or a run's folder"
        )
        if "out" not in keys or len(names) > 1:
            raise ConfigError("name one checkpoint or run's folder, and out, the folder to make")
        logging.basicConfig(format="%(message)s")
        from dlrm_sharded.checkpoint.good import best_checkpoint
        from dlrm_sharded.checkpoint.weights_export import export  # loads torch

        out = folder_to_write("out", keys["out"])
        manifest = best_checkpoint(location("the checkpoint", names[0]))
        done = export(manifest, out, blocks_dir=keys.get("data.blocks_dir"))
        print(
            f"{out}: weights of tables ({done.num_tables}) and dense layers ({done.num_dense}), "
            f"{done.size_bytes:,} B, of step {manifest.state.step:,} in {manifest.folder}"
        )


if __name__ == "__main__":
    main()
