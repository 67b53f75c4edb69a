"""Reads a checkpoint into a model, from any plan and number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_sharded.checkpoint.logical import PART_BYTES, LogicalTensor, Piece, State
from dlrm_sharded.checkpoint.manifest import Manifest
from dlrm_sharded.checkpoint.model_state import ModelState
from dlrm_sharded.checkpoint.storage import is_table, is_weight, read_pieces
from dlrm_sharded.files.errors import CheckpointError
from dlrm_sharded.files.remote_files import Location
from dlrm_sharded.ranks.agreement import all_or_none

log = logging.getLogger(__name__)

RANK_PREFIX = "ranks."
"""Prefix of the names of tensors that belong to one rank, such as its random states."""


def load_model(manifest: Manifest, state: ModelState) -> None:
    """Read weights and optimizer state; a collective of all ranks.

    Raises:
        CheckpointError: a tensor is missing, unknown or has another shape; then nothing is read.
    """
    written = {name for name in manifest.tensors if not name.startswith(RANK_PREFIX)}
    with all_or_none():
        _check_names(manifest.folder, state.tensors, written)
        _check_shapes(manifest, state.tensors, without=state.row_states)
        _check_bounds(manifest, state)
    written_bounds, bounds = manifest.state.column_bounds, state.column_bounds
    tables = {name: _table_of(name) for name in state.row_states}
    other = {name: t for name, t in tables.items() if written_bounds[t] != bounds[t]}
    with all_or_none():
        alike = {n: state.tensors[n].pieces for n in state.tensors if n not in other}
        read_pieces(manifest, alike)
        for name, table in other.items():
            _convert(
                manifest,
                name,
                state.row_states[name],
                written=written_bounds[table],
                wanted=bounds[table],
            )
    if other and dist.get_rank() == 0:
        log.info(
            "row-wise optimizer state of %d tables was converted to other column splits: the "
            "width-weighted mean of the shards that a new shard overlaps",
            len(other),
        )


def load_weights(manifest: Manifest, state: ModelState) -> None:
    """Read only the weights; a collective of all ranks.

    Raises:
        CheckpointError: a weight is missing, unknown or has another shape; then nothing is read.
    """
    written = set(filter(is_weight, manifest.tensors))
    with all_or_none():
        _check_names(manifest.folder, state.weights, written)
        _check_shapes(manifest, state.weights)
    with all_or_none():
        read_pieces(manifest, {name: state.weights[name].pieces for name in state.weights})


def load_whole(manifest: Manifest, name: str) -> Tensor:
    """Return a whole logical tensor; not a collective."""
    written = manifest.tensors[name]
    tensor = torch.empty(written.shape, dtype=getattr(torch, written.dtype))
    read_pieces(manifest, {name: [Piece((0,) * tensor.dim(), tensor)]})
    return tensor


def _check_names(folder: Location, expected: Collection[str], written: Collection[str]) -> None:
    for names, problem in (
        (set(expected) - set(written), "lacks"),
        (set(written) - set(expected), "has, but the model lacks,"),
    ):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise CheckpointError(
                f"{folder} {problem} {len(names)} tensors: {shown}; resume with the model, tables "
                "and optimizers that it was written with, or take its weights with init_from"
            )


def _check_shapes(manifest: Manifest, state: State, without: Collection[str] = ()) -> None:
    for name, logical in state.items():
        written = manifest.tensors[name]
        dtype = str(logical.dtype).removeprefix("torch.")
        # plans may have a table in fp32 or in fp16; reading converts it
        has_dtype = written.dtype == dtype or (
            is_table(name) and written.dtype in ("float32", "float16")
        )
        if name not in without and not (written.shape == logical.shape and has_dtype):
            raise CheckpointError(
                f"{manifest.folder}: {name} is {written.dtype} {list(written.shape)}, the model's "
                f"is {dtype} {list(logical.shape)}; resume with the model that it was written with"
            )


def _check_bounds(manifest: Manifest, state: ModelState) -> None:
    """Check that row-wise state has a column for each column shard in the checkpoint."""
    for name, logical in state.row_states.items():
        table = _table_of(name)
        bounds = manifest.state.column_bounds.get(table, ())
        written = manifest.tensors[name]
        if written.shape != (logical.shape[0], len(bounds) - 1):
            raise CheckpointError(
                f"{manifest.folder}: {name} is {list(written.shape)} for column shards at "
                f"{list(bounds)}, the model's table has {logical.shape[0]:,} rows; resume with "
                "the model that it was written with"
            )


def _table_of(state_name: str) -> str:
    return state_name.removeprefix("tables.").rpartition(".")[0]


def _convert(
    manifest: Manifest,
    name: str,
    logical: LogicalTensor,
    *,
    written: tuple[int, ...],
    wanted: tuple[int, ...],
) -> None:
    """Fill row-wise state for column shards that differ from those in the checkpoint.

    A row's state is a mean over the columns of its shard, here the mean of squared gradients. So
    the state of merged shards is the mean of their states, weighted by width, and the parts of a
    divided shard keep its state.

    Args:
        written, wanted: column bounds.
    """
    for piece in logical.pieces:
        first_row, place = piece.offsets
        start, stop = wanted[place], wanted[place + 1]
        overlaps = {
            number: min(stop, written[number + 1]) - max(start, written[number])
            for number in range(len(written) - 1)
            if written[number] < stop and written[number + 1] > start
        }
        widths = torch.tensor(list(overlaps.values()), dtype=torch.float64)
        height = max(1, PART_BYTES // (12 * len(widths)))  # in fp32 and in fp64
        for row in range(0, piece.tensor.shape[0], height):
            target = piece.tensor[row : row + height]
            found = torch.empty(target.shape[0], len(widths), dtype=logical.dtype)
            read_pieces(manifest, {name: [Piece((first_row + row, min(overlaps)), found)]})
            target.copy_((found.double() @ (widths / widths.sum())).unsqueeze(1))
