"""The safetensors format, written directly from the memory of the tensors.

The library's own function returns a whole file as one object. While it copies the tensors there, it
holds the GIL: for 64 MiB, no other thread of the process runs Python for 40 ms.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_sharded.checkpoint.manifest import DTYPES

ALIGNMENT = 8
"""Headers end at multiples of this, padded with spaces."""


class TensorEntry(NamedTuple):
    """A tensor in a file, as the header describes it.

    Args:
        dtype: torch's name of the dtype, such as "float32".
    """

    name: str
    dtype: str
    shape: Sequence[int]
    size_bytes: int


def header(entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a header, preceded by its length: JSON with the position of each tensor.

    Args:
        entries: the tensors in their order in the file.
    """
    fields: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, size_bytes in entries:
        start, end = end, end + size_bytes
        fields[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def content_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file with these tensors, the same bytes as `safetensors.torch.save`.

    Tensors are yielded as views of their memory, which checksums and files read without the GIL. A
    tensor on a GPU is copied when its turn comes.
    """
    places = {dtype: place for place, dtype in enumerate(DTYPES)}
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    names = sorted(tensors, key=lambda name: (places[dtypes[name]], name))
    yield header(
        TensorEntry(name, dtypes[name], tensors[name].shape, tensors[name].nbytes) for name in names
    )
    for name in names:
        yield bytes_of(tensors[name])


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order: a view of its memory, or of a copy if needed."""
    in_order = tensor.detach().cpu().contiguous()
    view: memoryview = in_order.reshape(-1).view(torch.uint8).numpy().data
    return view
