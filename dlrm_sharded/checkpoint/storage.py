"""The storage of checkpoints: safetensors files and a manifest, without pickled objects."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dlrm_sharded.checkpoint.logical import PART_BYTES, Piece
from dlrm_sharded.checkpoint.manifest import (
    FILE_NAME,
    Block,
    Manifest,
    PartFile,
    RunState,
    WrittenTensor,
    manifest_bytes,
)
from dlrm_sharded.files.errors import CheckpointError, DamagedCheckpointError, DivergenceError
from dlrm_sharded.files.json_files import write_durably

WrittenPart = tuple[str, PartFile, list[tuple[MetadataIndex, str]]]
"""Name of a part, its checksum, and the keys of the blocks in it."""


class PartWriter(StorageWriter):
    """Writes the blocks of one rank into parts, and on the coordinator the manifest.

    A value that is not finite is a DivergenceError, after which the folder is no checkpoint.

    Args:
        folder: folder of the checkpoint, which is a checkpoint once it has a manifest.
        state: what the manifest says besides the tensors.
    """

    def __init__(self, folder: Path, state: RunState, *, rank: int) -> None:
        self._folder = folder
        self._state = state
        self._rank = rank

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_parts(plan.items)):
            name = f"rank-{self._rank:05}-{number:05}.safetensors"
            keys = {item.index: _key(item.index) for item in items}
            tensors = {item.index: _on_cpu(planner.resolve_data(item)) for item in items}
            for index, tensor in tensors.items():
                self._check_finite(index.fqn, tensor)
            file = _write_part(
                self._folder / name, {keys[index]: tensor for index, tensor in tensors.items()}
            )
            results += [
                WriteResult(item.index, file.size_bytes, (name, file, keys[item.index]))
                for item in items
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _check_finite(self, name: str, block: Tensor) -> None:
        num_bad = num_not_finite(block, may_be_infinite=name in self._state.buffers)
        if num_bad:
            raise DivergenceError(
                f"{num_bad:,} of {block.numel():,} values of {name} are not finite after step "
                f"{self._state.step}"
            )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, with which the folder becomes a checkpoint."""
        written = {result.index: result.storage_data for rank in results for result in rank}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[name] = WrittenTensor(
                str(tensor.properties.dtype).removeprefix("torch."),
                tuple(tensor.size),
                tuple(
                    Block(
                        tuple(chunk.offsets),
                        tuple(chunk.sizes),
                        *(written[MetadataIndex(name, chunk.offsets)][i] for i in (0, 2)),
                    )
                    for chunk in tensor.chunks
                ),
            )
        files = {name: file for name, file, _ in written.values()}
        content = manifest_bytes(self._state, tensors, dict(sorted(files.items())))
        write_durably(self._folder / FILE_NAME, [content])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class PartReader:
    """Reads the rectangles that a rank needs; parts are mapped, not read whole."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._blocks = {
            MetadataIndex(name, block.offsets): block
            for name, tensor in manifest.tensors.items()
            for block in tensor.blocks
        }

    def read(self, wanted: Mapping[str, Sequence[Piece]]) -> None:
        """Read rectangles of logical tensors into pieces, and each part once.

        Raises:
            CheckpointError: a part cannot be read.
        """
        items: list[ReadItem] = []
        targets: dict[MetadataIndex, Tensor] = {}
        for name, pieces in wanted.items():
            ranges = [piece.index_range for piece in pieces]
            items += create_read_items_for_chunk_list(name, self._metadata(name), ranges)
            targets |= {MetadataIndex(name, piece.offsets): piece.tensor for piece in pieces}

        def part_of(item: ReadItem) -> str:
            return self._blocks[item.storage_index].file

        for part, in_part in groupby(sorted(items, key=part_of), key=part_of):
            try:
                with safe_open(self._manifest.folder / part, framework="pt") as file:
                    for item in in_part:
                        target = targets[item.dest_index][_slices(item.dest_offsets, item.lengths)]
                        key = self._blocks[item.storage_index].key
                        target.copy_(_rectangle(file, key, item))
            except (OSError, SafetensorError, RuntimeError) as error:
                raise _unreadable(self._manifest, part, error) from error

    def _metadata(self, name: str) -> TensorStorageMetadata:
        """Return DCP's description of a logical tensor, from which it finds what overlaps."""
        tensor = self._manifest.tensors[name]
        return TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(tensor.dtype)),
            torch.Size(tensor.shape),
            [
                ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes))
                for block in tensor.blocks
            ],
        )


def _unreadable(manifest: Manifest, part: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{manifest.folder} cannot be read: {part}: {error}")


def num_not_finite(tensor: Tensor, *, may_be_infinite: bool = False) -> int:
    """Return the number of NaNs and infinities; integers have none.

    Args:
        may_be_infinite: whether NaNs alone count.
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
    """Check that undamaged parts hold finite values; earlier versions have written others.

    Args:
        weights_only: whether the state of optimizers and ranks is left out.
        share, num_shares: this rank's share of the files, so that ranks check them together.

    Raises:
        DamagedCheckpointError: a value is not finite; the message has the tensor and the number.
    """
    keys: dict[str, list[tuple[str, str]]] = {}
    for name, tensor in manifest.tensors.items():
        for block in tensor.blocks:
            keys.setdefault(block.file, []).append((name, block.key))
    num_bad: Counter[str] = Counter()
    for part in sorted(manifest.files)[share::num_shares]:
        try:
            with safe_open(manifest.folder / part, framework="pt") as file:
                for name, key in keys.get(part, ()):
                    if is_weight(name) or not weights_only:
                        is_buffer = name in manifest.state.buffers
                        num_bad[name] += num_not_finite(
                            file.get_tensor(key), may_be_infinite=is_buffer
                        )
        except (OSError, SafetensorError, RuntimeError) as error:
            raise _unreadable(manifest, part, error) from error
    bad = [name for name, number in num_bad.items() if number]
    bad.sort(key=lambda name: (not is_weight(name), name))
    if bad:
        others = f"; so have {len(bad) - 1} other tensors" if len(bad) > 1 else ""
        raise DamagedCheckpointError(
            f"{manifest.folder} is of a training that diverged: {bad[0]} has {num_bad[bad[0]]:,} "
            f"values that are not finite{others}"
        )


def is_weight(name: str) -> bool:
    """Return whether a logical tensor is a weight or buffer of the model."""
    return name.startswith("dense.") or is_table(name)


def is_table(name: str) -> bool:
    """Return whether a logical tensor is the weights of a table."""
    return name.startswith("tables.") and name.endswith(".weight")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of this name, such as "float32"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is not the name of a dtype")
    return dtype


def _parts(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Divide blocks into parts of at most `PART_BYTES`, unless one block is larger."""
    part: list[WriteItem] = []
    size = 0
    for item in items:
        item_bytes = item.tensor_storage_size() or 0
        if part and size + item_bytes > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(item)
        size += item_bytes
    if part:
        yield part


def _write_part(path: Path, tensors: dict[str, Tensor]) -> PartFile:
    content = save(tensors)
    write_durably(path, [content])
    return PartFile(len(content), zlib.crc32(content))


def _on_cpu(tensor: Any) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _key(index: MetadataIndex) -> str:
    return f"{index.fqn}[{', '.join(map(str, index.offset or ()))}]"


def _rectangle(file: Any, key: str, item: ReadItem) -> Tensor:
    if not item.lengths:
        return file.get_tensor(key)
    return file.get_slice(key)[_slices(item.storage_offsets, item.lengths)]


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in zip(offsets, lengths, strict=True))
