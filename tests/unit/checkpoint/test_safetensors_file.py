"""Files of safetensors that are written from the memory of tensors."""

import tracemalloc

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import DTYPES
from dlrm_sharded.checkpoint.safetensors_file import content_of
from tests.unit.checkpoint.cases import PART, TABLE, write

MIB = 2**20
TENSORS: dict[str, dict[str, Tensor]] = {
    "every_dtype": {
        f"tensor {place}": torch.arange(6).to(getattr(torch, dtype))
        for place, dtype in enumerate(DTYPES)
    },
    "names": {name: torch.tensor([1.0, 2.0]) for name in ("b", "a[0, 0]", 'ü"\\\n\x01/', "Z", "é")},
    "shapes": {"scalar": torch.tensor(7.0), "none": torch.empty(0, 3), "one": torch.ones(1)},
    "views": {"columns": TABLE[:, 1:4], "rows": TABLE[2:5], "turned": TABLE.t()},
    "no_tensors": {},
}


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
def test_they_are_those_of_the_library(tensors):
    """Byte for byte, with tensors of one dtype in the order of their names."""
    written = b"".join(bytes(content) for content in content_of(tensors))
    in_order = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert written == save(in_order)
    assert all(torch.equal(load(written)[name], tensor) for name, tensor in tensors.items())


def test_parts_of_checkpoints_are_those_of_the_library(tmp_path, rank):
    pieces = (Piece((0, 0), TABLE[:, :4]), Piece((0, 4), TABLE[:, 4:]))
    state = {"tables.t.weight": LogicalTensor((10, 6), torch.float32, pieces)}
    path = write(tmp_path, rank, state=state)
    blocks = {f"tables.t.weight[0, {p.offsets[1]}]": p.tensor.contiguous() for p in pieces}
    assert (path / PART).read_bytes() == save(blocks)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_no_object_of_python_holds_a_part(background, tmp_path, rank):
    """Whoever makes one holds the interpreter's lock meanwhile, and with it all other threads."""
    state = {"tables.t.weight": LogicalTensor.whole(torch.ones(8 * MIB))}
    tracemalloc.start()
    try:
        write(tmp_path, rank, state=state, background=background)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (path,) = checkpoints(tmp_path)
    assert (path / PART).stat().st_size > 32 * MIB
    assert peak_bytes < 4 * MIB
