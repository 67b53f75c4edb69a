"""Checkpoints with damaged files, and with wrong manifests whose checksums are right."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from dlrm_sharded.checkpoint.manifest import (
    FILE_NAME,
    Block,
    PartFile,
    RunState,
    WrittenTensor,
    check_parts,
    manifest_bytes,
    read_manifest,
    with_checksum,
)
from dlrm_sharded.checkpoint.restore import load_whole
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.progress import Progress, read_progress
from tests.soak.input_mutations import changed_json, damaged

PART = "rank-00000-00000.safetensors"
RANK = Rank(0, 1, 0, 1, torch.device("cpu"))
STATE = RunState(
    run="the run",
    step=5,
    batch_size=4,
    seed=0,
    epoch_batches=3,
    world_size=1,
    optimizers={"embedding": "sgd"},
    column_bounds={"t": (0, 4, 6)},
    progress=Progress(step=5).to_json(),
    plan={"shards": []},
    config={"seed": 0},
    events=("events.out.tfevents.1", 100),
)


@functools.cache
def _files() -> tuple[bytes, bytes]:
    """Return a part and its manifest."""
    progress = Progress(step=5, window_losses=torch.ones(2), step_ms=torch.ones(3))
    tensors = {"tables.t.weight": torch.arange(24.0).reshape(4, 6)} | {
        name: logical.pieces[0].tensor for name, logical in progress.tensors(RANK).items()
    }
    written = {
        name: WrittenTensor(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            (Block((0,) * tensor.dim(), tuple(tensor.shape), PART, name),),
        )
        for name, tensor in tensors.items()
    }
    part = save(tensors)
    file = PartFile(len(part), zlib.crc32(part))
    return part, manifest_bytes(STATE, written, {PART: file})


@st.composite
def checkpoints(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[bytes, bytes]:
    """Draw the two files of a checkpoint."""
    part, manifest = _files()
    fields = json.loads(manifest)
    del fields["crc32"]
    change = draw(st.sampled_from(["part", "signed part", "manifest", "value", "value"]))
    if change == "manifest":
        return part, draw(damaged(manifest))
    if change.endswith("part"):
        part = draw(damaged(part))
        if change == "signed part":
            fields["files"] = {PART: [len(part), zlib.crc32(part)]}
    else:
        fields = draw(changed_json(fields))
    return part, with_checksum(fields)


def read_checkpoint(files: tuple[bytes, bytes], folder: Path) -> None:
    for name, data in zip((PART, FILE_NAME), files, strict=True):
        (folder / name).write_bytes(data)
    manifest = read_manifest(folder)
    check_parts(manifest)
    for name in manifest.tensors:
        load_whole(manifest, name)
    read_progress(manifest, RANK, same_plan=True)
