"""Parts whose checksums are right, but which do not contain what the manifest says."""

import pickle
import re
import zlib

import pytest

from dlrm_sharded.checkpoint.manifest import check_parts, read_manifest
from dlrm_sharded.files.errors import CheckpointError
from tests.soak.damage import lie
from tests.unit.checkpoint.cases import PART, write


def other_shape(tensor):
    tensor["shape"], tensor["blocks"][0][1] = [3], [3]


def other_dtype(tensor):
    tensor["dtype"] = "float64"


def other_key(tensor):
    tensor["blocks"][0][3] = "dense.other[0]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_shape, "has dense.over.bias[0] as F32 [2], manifest.json says F32 [3]"),
        (other_dtype, "as F32 [2], manifest.json says F64 [2]"),
        (other_key, "has dense.other[0] as nothing, manifest.json says F32 [2]"),
    ],
)
def test_other_blocks(change, message, tmp_path, rank):
    path = write(tmp_path, rank)
    lie(path, lambda fields: change(fields["tensors"]["dense.over.bias"]))
    with pytest.raises(CheckpointError, match=rf"{PART}.*{re.escape(message)}"):
        check_parts(read_manifest(path))


@pytest.mark.parametrize(
    "content",
    [pickle.dumps({"a": 1}), b"", b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{]"],
)
def test_no_safetensors(content, tmp_path, rank):
    path = write(tmp_path, rank)
    (path / PART).write_bytes(content)
    lie(path, lambda fields: fields["files"].update({PART: [len(content), zlib.crc32(content)]}))
    with pytest.raises(CheckpointError, match="as nothing"):
        check_parts(read_manifest(path))
