"""The form of safetensors files, written from the memory of the tensors.

The library's own function returns a whole file as one object. It holds the interpreter's lock while
it copies the tensors to it, 40 ms for 64 MiB, in which no other thread of the process runs Python.
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
    """A tensor of a file, as the header describes it.

    Args:
        dtype: torch's name of it, such as "float32".
    """

    name: str
    dtype: str
    shape: Sequence[int]
    size_bytes: int


def header(entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the length of a header, and the header: JSON with the place of each tensor.

    Args:
        entries: tensors in the order in which they lie in the file.
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
    """Yield a file with these tensors, byte for byte as `safetensors.torch.save` returns it.

    Tensors are views of their memory, which checksums and files read without the interpreter's
    lock. One on a GPU is copied when its turn comes.
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
    """Return the memory of a tensor in row-major order, or of its copy if that lies elsewhere."""
    in_order = tensor.detach().cpu().contiguous()
    view: memoryview = in_order.reshape(-1).view(torch.uint8).numpy().data
    return view
