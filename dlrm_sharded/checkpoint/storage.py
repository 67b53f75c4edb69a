"""The storage of checkpoints: safetensors files and a manifest, without pickled objects."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlrm_sharded.checkpoint.logical import PART_BYTES, Piece, State
from dlrm_sharded.checkpoint.manifest import (
    FILE_NAME,
    Block,
    Manifest,
    PartFile,
    RunState,
    WrittenTensor,
    check_seen,
    manifest_bytes,
)
from dlrm_sharded.checkpoint.safetensors_file import content_of
from dlrm_sharded.files.errors import CheckpointError, DamagedCheckpointError, DivergenceError
from dlrm_sharded.files.json_files import write_durably
from dlrm_sharded.files.remote_files import Location, local_file
from dlrm_sharded.ranks.agreement import all_or_none, on_rank_zero

T = TypeVar("T")

Place = tuple[str, tuple[int, ...]]
"""A block of a logical tensor, by the name of the tensor and the offsets of the block."""

Written = tuple[
    dict[str, PartFile], dict[str, list[Block]], dict[str, tuple[torch.dtype, tuple[int, ...]]]
]
"""A rank's parts, their blocks by logical tensor, and type and shape of each logical tensor."""

Slices = tuple[slice, ...]


def write_checkpoint(
    folder: Location, tensors: State, state: RunState, *, group: dist.ProcessGroup
) -> None:
    """Write the parts, then the manifest, which makes the folder a checkpoint; a collective.

    If any rank fails, all ranks raise its error.

    Args:
        state: what the manifest records besides the tensors.
        group: the ranks that write.

    Raises:
        DivergenceError: a value is not finite; then nothing is written.
        OSError: the disk cannot write it.
    """
    blocks = {
        (name, block.offsets): block.tensor
        for name, logical in tensors.items()
        for piece in logical.pieces
        for block in piece.blocks()
    }
    rank = dist.get_rank(group)
    writers = _writers(_gathered({place: block.nbytes for place, block in blocks.items()}, group))
    mine = {place: blocks[place] for place, writer in writers.items() if writer == rank}
    with all_or_none(group=group):
        for (name, _), block in mine.items():
            if num_bad := num_not_finite(block, may_be_infinite=name in state.buffers):
                raise DivergenceError(
                    f"{num_bad:,} of {block.numel():,} values of {name} are not finite after step "
                    f"{state.step}"
                )
    with all_or_none(group=group):
        files, written = _write_parts(folder, mine, rank)
    forms = {name: (logical.dtype, logical.shape) for name, logical in tensors.items()}
    by_rank = _gathered((files, written, forms), group)
    on_rank_zero(lambda: _write_manifest(folder, state, by_rank), group=group)


def _gathered(of_rank: T, group: dist.ProcessGroup) -> list[T]:
    by_rank = [of_rank] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, of_rank, group=group)
    return by_rank


def _writers(held: Sequence[Mapping[Place, int]]) -> dict[Place, int]:
    """Return the rank that writes each block: the holder that so far has the least to write.

    Args:
        held: sizes of the blocks that each rank holds, in bytes.
    """
    holders: dict[Place, list[int]] = {}
    for rank, of_rank in enumerate(held):
        for place in of_rank:
            holders.setdefault(place, []).append(rank)
    writers, sizes = {}, [0] * len(held)
    for place, ranks in holders.items():
        writers[place] = min(ranks, key=sizes.__getitem__)
        sizes[writers[place]] += held[writers[place]][place]
    return writers


def _write_parts(
    folder: Location, blocks: Mapping[Place, Tensor], rank: int
) -> tuple[dict[str, PartFile], dict[str, list[Block]]]:
    """Write blocks; return the parts, and the blocks by logical tensor."""
    files: dict[str, PartFile] = {}
    written: dict[str, list[Block]] = {}
    for number, places in enumerate(_parts(blocks)):
        file = f"rank-{rank:05}-{number:05}.safetensors"
        files[file] = _write_part(folder / file, {_key(place): blocks[place] for place in places})
        for name, offsets in places:
            sizes, key = tuple(blocks[name, offsets].shape), _key((name, offsets))
            written.setdefault(name, []).append(Block(offsets, sizes, file, key))
    return files, written


def _write_part(path: Location, tensors: Mapping[str, Tensor]) -> PartFile:
    """Write a file while other threads run: nothing here holds the GIL for a whole block."""
    size_bytes = checksum = 0

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal size_bytes, checksum
        for content in content_of(tensors):
            size_bytes += len(content)
            checksum = zlib.crc32(content, checksum)
            yield content

    write_durably(path, counted())
    return PartFile(size_bytes, checksum)


def _write_manifest(folder: Location, state: RunState, by_rank: Sequence[Written]) -> None:
    files: dict[str, PartFile] = {}
    blocks: dict[str, list[Block]] = {}
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for of_rank, written, known in by_rank:
        files |= of_rank
        forms |= known
        for name, some in written.items():
            blocks.setdefault(name, []).extend(some)
    tensors = {
        name: WrittenTensor(
            str(dtype).removeprefix("torch."), shape, tuple(sorted(blocks.get(name, ())))
        )
        for name, (dtype, shape) in forms.items()
    }
    check_seen(folder, files)
    content = manifest_bytes(state, tensors, dict(sorted(files.items())))
    write_durably(folder / FILE_NAME, [content])


def read_pieces(manifest: Manifest, wanted: Mapping[str, Sequence[Piece]]) -> None:
    """Read rectangles of logical tensors into pieces; each part is memory-mapped once.

    Raises:
        CheckpointError: a part cannot be read.
    """
    common: dict[str, list[tuple[Block, Piece, tuple[Slices, Slices]]]] = {}
    for name, pieces in wanted.items():
        for block, piece in itertools.product(manifest.tensors[name].blocks, pieces):
            if slices := _overlap(block, piece):
                common.setdefault(block.file, []).append((block, piece, slices))
    for part, in_part in common.items():
        with _opened(manifest, part) as file:
            for block, piece, (source, target) in in_part:
                # A scalar has no slices.
                whole = file.get_slice(block.key) if source else file.get_tensor(block.key)
                piece.tensor[target].copy_(whole[source])


def _overlap(block: Block, piece: Piece) -> tuple[Slices, Slices] | None:
    """Return the overlap of a block and a piece, as slices of each; None if there is none."""
    ends = [
        (max(first, start), min(first + size, start + length))
        for first, size, start, length in zip(
            block.offsets, block.sizes, piece.offsets, piece.tensor.shape, strict=True
        )
    ]
    if any(start >= stop for start, stop in ends):
        return None
    of_block, of_piece = (
        tuple(slice(a - first, b - first) for (a, b), first in zip(ends, offsets, strict=True))
        for offsets in (block.offsets, piece.offsets)
    )
    return of_block, of_piece


@contextmanager
def _opened(manifest: Manifest, part: str) -> Iterator[Any]:
    """Open a part with safetensors; raise CheckpointError if the block cannot read it."""
    try:
        with local_file(manifest.folder / part) as path, safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{manifest.folder} cannot be read: {part}: {error}") from error


def num_not_finite(tensor: Tensor, *, may_be_infinite: bool = False) -> int:
    """Return the number of NaNs and infinities; integers have none.

    Args:
        may_be_infinite: whether only NaNs count.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return 0
    # One pass without a temporary tensor. A NaN makes both bounds NaN.
    bounds = torch.stack(tensor.detach().aminmax())
    if bool(bounds.isfinite().all()):
        return 0
    return int((tensor.isnan() if may_be_infinite else ~tensor.isfinite()).sum())


def check_finite(
    manifest: Manifest, *, weights_only: bool = False, share: int = 0, num_shares: int = 1
) -> None:
    """Check that undamaged parts hold finite values; earlier versions wrote others, too.

    Args:
        weights_only: whether to leave out the state of optimizers and ranks.
        share, num_shares: this rank's share of the files, so that ranks check them together.

    Raises:
        DamagedCheckpointError: a value is not finite.
    """
    blocks = manifest.blocks_by_part()
    num_bad: Counter[str] = Counter()
    for part in sorted(manifest.files)[share::num_shares]:
        with _opened(manifest, part) as file:
            for name, block in blocks[part]:
                if is_weight(name) or not weights_only:
                    is_buffer = name in manifest.state.buffers
                    num_bad[name] += num_not_finite(
                        file.get_tensor(block.key), may_be_infinite=is_buffer
                    )
    bad = [name for name, number in num_bad.items() if number]
    bad.sort(key=lambda name: (not is_weight(name), name))
    if bad:
        others = f"; so have {len(bad) - 1} other tensors" if len(bad) > 1 else ""
        raise DamagedCheckpointError(
            f"{manifest.folder} is from a training that diverged: {bad[0]} has {num_bad[bad[0]]:,} "
            f"values that are not finite{others}"
        )


def is_weight(name: str) -> bool:
    """Return whether a logical tensor is a weight or buffer of the model."""
    return name.startswith("dense.") or is_table(name)


def is_table(name: str) -> bool:
    """Return whether a logical tensor holds the weights of a table."""
    return name.startswith("tables.") and name.endswith(".weight")


def _parts(blocks: Mapping[Place, Tensor]) -> Iterator[list[Place]]:
    """Group blocks into parts of at most `PART_BYTES`, unless one block is larger."""
    part: list[Place] = []
    size = 0
    for place, block in blocks.items():
        if part and size + block.nbytes > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(place)
        size += block.nbytes
    if part:
        yield part


def _key(place: Place) -> str:
    name, offsets = place
    return f"{name}[{', '.join(map(str, offsets))}]"
