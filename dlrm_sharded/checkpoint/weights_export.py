"""Writes the weights of a checkpoint for serving, as safetensors files that no plan shards."""

from __future__ import annotations

import errno
import functools
import json
import logging
import math
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlrm_sharded.checkpoint.exported_form import (
    DENSE_FILE,
    ENCODER_FOLDER,
    MODEL_FILE,
    ExportedForm,
)
from dlrm_sharded.checkpoint.logical import Piece
from dlrm_sharded.checkpoint.manifest import Manifest, RunState
from dlrm_sharded.checkpoint.safetensors_file import TensorEntry, bytes_of, header
from dlrm_sharded.checkpoint.storage import is_table, read_pieces
from dlrm_sharded.checkpoint.trained_encoder import trained_encoder
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.json_files import sync_folder, write_durably
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.versions import readable_versions

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
MODELS = "dlrm_sharded.model.dlrm"
"""Module of the functions that build models."""

ARGUMENTS = ("dense_layers", "over_layers", "num_cross_layers", "cross_rank")
"""Arguments of these functions that are in model.json."""

BLOCK_BYTES = 2**24
"""Largest size of a table's rows in memory at a time, unless one row is larger."""


@dataclass(frozen=True, slots=True)
class Export:
    """Describes what `export` wrote.

    Args:
        size_bytes: size of all tensors.
    """

    num_tables: int
    num_dense: int
    size_bytes: int


def export(manifest: Manifest, out: Path, *, blocks_dir: str | None = None) -> Export:
    """Write the weights of a checkpoint into a new folder, completely or not at all.

    The folder has one file with the dense weights under their names in the model, one file for each
    table, whose tensor is called `tables.<table>.weight`, and an index in the format that Hugging
    Face uses for models of several files. Names of tables are never part of a path. `load_exported`
    also needs model.json and, if the data had a schema, the encoder's folder. If model.json cannot
    be written, a warning is logged.

    Args:
        blocks_dir: folder of the run's converted data, if it has moved; "none" to export without
            the encoder.

    Raises:
        CheckpointError: a part cannot be read.
        DataError: the folder exists already, or cannot be written, or the encoder is missing.
    """
    if out.exists() or out.is_symlink():
        raise DataError(f"{out} exists already; give another folder, or remove it")
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.partial")  # others may write, too
    try:
        partial.mkdir(parents=True)
        exported = _write(manifest, partial, blocks_dir)
        partial.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise DataError(f"{out} was written by another export; give another folder") from error
        raise DataError(f"cannot write {out}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return exported


def _write(manifest: Manifest, folder: Path, blocks_dir: str | None) -> Export:
    encoder = None if blocks_dir == "none" else trained_encoder(manifest, blocks_dir)
    # Dense weights get the model's names; state of optimizers and ranks is left out.
    dense = {
        name: name.removeprefix("dense.") for name in manifest.tensors if name.startswith("dense.")
    }
    tables = list(filter(is_table, manifest.tensors))
    weight_map = dict.fromkeys(dense.values(), DENSE_FILE)
    _write_file(folder / DENSE_FILE, manifest, dense)
    for number, name in enumerate(tables, start=1):
        file = f"table-{number:05}-of-{len(tables):05}.safetensors"
        weight_map[name] = file
        _write_file(folder / file, manifest, {name: name})
    size_bytes = sum(_size_bytes(manifest, name) for name in [*dense, *tables])
    metadata = {"total_size": size_bytes, "run": manifest.state.run, "step": manifest.state.step}
    index = {"metadata": metadata, "weight_map": weight_map}
    write_durably(folder / INDEX_FILE, [(json.dumps(index, indent=1) + "\n").encode()])
    try:
        form = _model_form(manifest.state, weight_map)
        write_durably(folder / MODEL_FILE, [(json.dumps(asdict(form), indent=1) + "\n").encode()])
        _copy_encoder(encoder, folder / ENCODER_FOLDER)
    except DataError as error:
        log.warning("the weights are exported, but the export cannot score samples: %s", error)
    sync_folder(folder)
    return Export(len(tables), len(dense), size_bytes)


def _model_form(state: RunState, weight_map: Mapping[str, str]) -> ExportedForm:
    """Return the content of model.json for a run.

    Args:
        weight_map: the file of each tensor.

    Raises:
        DataError: `load_exported` cannot build the model, or the checkpoint does not describe it.
    """
    if state.model is None:
        raise DataError("the model was trained by a release before 0.4, which did not describe it")
    model = state.config.get("model", {})
    module, _, kind = str(model.get("_target_")).rpartition(".")
    if module != MODELS:
        raise DataError(f"its _target_ is {module}.{kind}, which is not a model of {MODELS}")
    fields = {
        **{key: model[key] for key in ARGUMENTS if key in model},
        "kind": kind,
        "num_dense": state.model["num_dense"],
        "tables": [
            {**table, "file": weight_map[f"tables.{table['name']}.weight"]}
            for table in state.model["tables"]
        ],
        "run": state.run,
        "step": state.step,
        "versions": readable_versions(("dlrm_sharded", "torch")),
    }
    return read_form(fields, ExportedForm, name="the description of the model")


def _copy_encoder(source: Path | None, out: Path) -> None:
    """Copy the folder of an encoder, if there is one."""
    if source is None:
        return
    out.mkdir()
    for path in sorted(source.iterdir()):
        with path.open("rb") as file:
            write_durably(out / path.name, iter(functools.partial(file.read, BLOCK_BYTES), b""))
    sync_folder(out)


def _write_file(path: Path, manifest: Manifest, names: Mapping[str, str]) -> None:
    """Write logical tensors to a safetensors file, a block of rows at a time.

    Args:
        names: names in the file, by name in the manifest.
    """

    def content() -> Iterator[bytes | memoryview]:
        yield header(_entries(manifest, names), {"format": "pt"})
        for name in names:
            for block in _blocks(manifest, name):
                yield bytes_of(block)

    write_durably(path, content())


def _entries(manifest: Manifest, names: Mapping[str, str]) -> Iterator[TensorEntry]:
    for name, in_file in names.items():
        tensor = manifest.tensors[name]
        yield TensorEntry(in_file, tensor.dtype, tensor.shape, _size_bytes(manifest, name))


def _blocks(manifest: Manifest, name: str) -> Iterator[Tensor]:
    """Yield the rows of a logical tensor in blocks."""
    tensor = manifest.tensors[name]
    whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
    for piece in Piece((0,) * whole.dim(), whole).blocks(BLOCK_BYTES):
        block = torch.empty_like(piece.tensor, device="cpu")
        read_pieces(manifest, {name: [Piece(piece.offsets, block)]})
        yield block


def _size_bytes(manifest: Manifest, name: str) -> int:
    tensor = manifest.tensors[name]
    return math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize
