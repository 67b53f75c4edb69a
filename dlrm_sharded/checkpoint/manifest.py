"""The manifest of a checkpoint: what its parts contain, and whether they are undamaged."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta
from safetensors import SafetensorError, safe_open

from dlrm_sharded.files.errors import CheckpointError, DamagedCheckpointError
from dlrm_sharded.files.json_files import read_file
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Count
from dlrm_sharded.files.remote_files import Location, local_file, seen_in_time, sizes_of

FILE_NAME = "manifest.json"
FORMAT = 1
PartName = Annotated[str, Meta(pattern=r"\Arank-\d{5}-\d{5}\.safetensors\Z")]
EventFile = Annotated[str, Meta(pattern=r"\Aevents\.out\.tfevents\.[^/\\\0]+\Z")]
"""The only values in a manifest that become paths have one of these two forms."""

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of a working disk that has no such file. Other errors may pass, and prove no damage."""

BLOCK_BYTES = 2**22

DTYPES = {
    **{"int64": "I64", "float64": "F64", "float32": "F32", "int32": "I32", "bfloat16": "BF16"},
    **{"float16": "F16", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
"""Safetensors' names of torch's dtypes, in the order in which the library writes their tensors."""


class Block(NamedTuple):
    """A rectangle of a logical tensor, and where it is written.

    Args:
        offsets, sizes: the rectangle, one number for each axis of the tensor.
        file, key: name of the part, and name of the tensor in it.
    """

    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A logical tensor in a checkpoint.

    Args:
        dtype: name of its torch dtype, such as "float32".
        blocks: rectangles that tile the tensor.
    """

    dtype: str
    shape: tuple[Count, ...]
    blocks: tuple[Block, ...]


class PartFile(NamedTuple):
    """Size and CRC-32 of a part."""

    size_bytes: Count
    crc32: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Describes a run at the time of a checkpoint.

    Args:
        run: id of the run that wrote the checkpoint.
        step: number of steps trained.
        batch_size, seed, epoch_batches: what decides the order of samples; the last one is the
            number of batches in an epoch.
        world_size: number of ranks that wrote the checkpoint.
        optimizers: names of the fused and of the dense optimizer.
        column_bounds: by table, the columns at which its column shards begin, and its number of
            columns. State with one number per row of a shard has one column for each shard.
        progress: the trainer's own state.
        plan: the plan and its report, as in plan.json.
        config: the run's config.
        events: name of the event file, and its size at the checkpoint; None if there is no file.
        buffers: names of the dense tensors that are not trained, such as masks, which may be
            infinite.
        model: number of dense features, tables in the model's order with their features, and the
            folder and digest of the data's encoder (None without one). The whole entry is None in
            checkpoints of release 0.3 and before.
        best_step: step of the run's checkpoint that is kept as its best one; None for none.
    """

    run: str
    step: Count
    batch_size: Count
    seed: Count
    epoch_batches: Count
    world_size: Count
    optimizers: Mapping[str, str]
    column_bounds: Mapping[str, tuple[Count, ...]]
    progress: Mapping[str, Any]
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    events: tuple[EventFile, Count] | None = None
    buffers: tuple[str, ...] = ()
    model: Mapping[str, Any] | None = None
    best_step: Count | None = None


@dataclass(frozen=True, slots=True)
class _Contents:
    """The entries of a manifest that are not in `RunState`."""

    tensors: Mapping[str, WrittenTensor]
    files: Mapping[PartName, PartFile]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint's manifest."""

    folder: Location
    state: RunState
    tensors: Mapping[str, WrittenTensor]
    files: Mapping[str, PartFile]

    def blocks_by_part(self) -> dict[str, list[tuple[str, Block]]]:
        """Return, by part, the blocks in it with the names of their tensors."""
        by_part: dict[str, list[tuple[str, Block]]] = {name: [] for name in self.files}
        for name, tensor in self.tensors.items():
            for block in tensor.blocks:
                by_part[block.file].append((name, block))
        return by_part


def manifest_bytes(
    state: RunState, tensors: Mapping[str, WrittenTensor], files: Mapping[str, PartFile]
) -> bytes:
    """Return the content of the manifest file, including its checksum."""
    fields = {
        "format": FORMAT,
        **{key: getattr(state, key) for key in RunState.__dataclass_fields__},
        "tensors": {name: dataclasses.asdict(tensor) for name, tensor in tensors.items()},
        "files": files,
    }
    fields["crc32"] = _checksum(fields)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_manifest(folder: Location) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedCheckpointError: there is no manifest, or it is damaged.
        CheckpointError: the disk cannot read it, or it has the format of another version.
    """
    try:
        path = folder / FILE_NAME
        text = read_file(path) if isinstance(path, Path) else path.read_bytes()
    except OSError as error:
        kind = DamagedCheckpointError if isinstance(error, MISSING) else CheckpointError
        raise kind(f"{folder} is not a checkpoint: {FILE_NAME}: {error.strerror}") from None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{FILE_NAME} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _damaged(folder, f"{FILE_NAME} is not that of a checkpoint")
    if (written := fields.get("format")) != FORMAT:
        raise CheckpointError(f"{folder} has the format {written!r}; this version reads {FORMAT}")
    if fields.pop("crc32", None) != _checksum(fields):
        raise _damaged(folder, f"{FILE_NAME} was changed after it was written")
    form = f"{folder} is damaged: {FILE_NAME} does not have the form of a manifest"
    read = partial(read_form, fields, name=form, error=DamagedCheckpointError, may_have_others=True)
    state, contents = read(RunState), read(_Contents)
    for tensor in contents.tensors.values():
        if problem := _problem_of(tensor, contents.files):
            raise DamagedCheckpointError(f"{form}: {problem}")
    return Manifest(folder, state, contents.tensors, contents.files)


def check_parts(manifest: Manifest, *, share: int = 0, num_shares: int = 1) -> None:
    """Check that the parts exist, are undamaged, and contain what the manifest says.

    Args:
        share, num_shares: this rank's share of the files, so that ranks check them together.

    Raises:
        DamagedCheckpointError: a part is missing, truncated, changed, or has other blocks.
        CheckpointError: the disk cannot read a part.
    """
    folder, expected_blocks = manifest.folder, manifest.blocks_by_part()
    for name in sorted(manifest.files)[share::num_shares]:
        expected = manifest.files[name]
        try:
            with local_file(folder / name) as path:
                size_bytes = path.stat().st_size
                if size_bytes != expected.size_bytes:
                    raise _damaged(
                        folder, f"{name} has {size_bytes:,} B instead of {expected.size_bytes:,} B"
                    )
                crc32, written = _file_checksum(path), _written_blocks(path)
        except MISSING as error:
            raise _damaged(folder, f"{name}: {error.strerror}") from None
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {name}: {error.strerror}") from None
        if crc32 != expected.crc32:
            raise _damaged(folder, f"{name} was changed after it was written")
        for tensor, block in expected_blocks[name]:
            dtype = manifest.tensors[tensor].dtype
            if written.get(block.key) != (DTYPES.get(dtype, dtype), block.sizes):
                raise _damaged(folder, f"{name} lacks {block.key} as {dtype} {[*block.sizes]}")


def has_whole_parts(manifest: Manifest) -> bool:
    """Return whether the parts exist and have their sizes, without reading them."""
    try:
        return _part_unlike(manifest.folder, manifest.files) is None
    except OSError:
        return False


def check_seen(folder: Location, files: Mapping[str, PartFile]) -> None:
    """Check that this rank sees the parts of all ranks, with the sizes that were written.

    Raises:
        OSError: a part is still missing, or has another size, after the time that shared disks may
            take.
    """
    if not seen_in_time(lambda: _part_unlike(folder, files) is None):
        name = _part_unlike(folder, files)
        raise OSError(
            f"rank 0 does not find {name} in {folder} as it was written; all hosts must share "
            "this folder"
        )


def _part_unlike(folder: Location, files: Mapping[str, PartFile]) -> str | None:
    """Return a part that is missing or has another size; None if there is none."""
    sizes = sizes_of(folder, files)
    return next((n for n, file in files.items() if sizes.get(n) != file.size_bytes), None)


def _damaged(folder: Location, reason: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{folder} is damaged: {reason}")


def _written_blocks(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return types and shapes in a safetensors file by key; empty for any other kind of file."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {key: (of.get_dtype(), tuple(of.get_shape())) for key, of in slices.items()}
    except SafetensorError:
        return {}


def _problem_of(tensor: WrittenTensor, files: Mapping[str, PartFile]) -> str | None:
    """Return why the blocks of a tensor cannot tile it; None if they can."""
    shape = tensor.shape
    for block in tensor.blocks:
        if block.file not in files:
            return f"{block.file!r} is not one of the parts"
        if not len(block.offsets) == len(block.sizes) == len(shape) or any(
            offset + size > whole
            for offset, size, whole in zip(block.offsets, block.sizes, shape, strict=True)
        ):
            return f"a block at {block.offsets} of {block.sizes} exceeds {shape}"
    if sum(math.prod(block.sizes) for block in tensor.blocks) != math.prod(shape):
        return f"the blocks do not cover a tensor of the shape {shape}"
    return None


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _file_checksum(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            crc32 = zlib.crc32(block, crc32)
    return crc32
