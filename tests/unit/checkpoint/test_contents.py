"""Parts whose checksums are right, but which do not contain what the manifest says."""

import json
import pickle
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.checkpoint.manifest import FILE_NAME, _checksum, check_parts, read_manifest
from dlrm_sharded.files.errors import CheckpointError
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.checkpoint.cases import write

PART = "rank-00000-00000.safetensors"


def change(path: Path, lie: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads((path / FILE_NAME).read_text())
    del fields["crc32"]
    lie(fields)
    (path / FILE_NAME).write_text(json.dumps({**fields, "crc32": _checksum(fields)}))


def other_shape(fields: dict[str, Any]) -> None:
    tensor = fields["tensors"]["dense.over.bias"]
    tensor["shape"], tensor["blocks"][0][1] = [3], [3]


def other_dtype(fields: dict[str, Any]) -> None:
    fields["tensors"]["dense.over.bias"]["dtype"] = "float64"


def other_key(fields: dict[str, Any]) -> None:
    fields["tensors"]["dense.over.bias"]["blocks"][0][3] = "dense.other[0]"


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (other_shape, "has dense.over.bias[0] as F32 [2], manifest.json says F32 [3]"),
        (other_dtype, "as F32 [2], manifest.json says F64 [2]"),
        (other_key, "has dense.other[0] as nothing, manifest.json says F32 [2]"),
    ],
)
def test_other_blocks(
    lie: Callable[[dict[str, Any]], None], message: str, tmp_path: Path, rank: Rank
) -> None:
    path = write(tmp_path, rank)
    change(path, lie)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_parts(read_manifest(path))


@pytest.mark.parametrize(
    "content",
    [pickle.dumps({"a": 1}), b"", b"\xff" * 100, b"\2\0\0\0\0\0\0\0[]", b"\2\0\0\0\0\0\0\0{]"],
)
def test_no_safetensors(content: bytes, tmp_path: Path, rank: Rank) -> None:
    path = write(tmp_path, rank)
    (path / PART).write_bytes(content)
    change(path, lambda f: f["files"].update({PART: [len(content), zlib.crc32(content)]}))
    with pytest.raises(CheckpointError, match="as nothing"):
        check_parts(read_manifest(path))
