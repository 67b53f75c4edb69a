"""What is written is read again, in other pieces; what is damaged is recognized."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded.checkpoint import logical
from dlrm_sharded.checkpoint.folder import checkpoint_path, checkpoints
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import (
    FILE_NAME,
    Manifest,
    _checksum,
    check_parts,
    read_manifest,
)
from dlrm_sharded.checkpoint.model_state import ModelState
from dlrm_sharded.checkpoint.restore import load_model, load_whole
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.checkpoint.storage import PartReader
from dlrm_sharded.files.errors import CheckpointError
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.checkpoint.cases import STATE, TABLE, filled, run_state, write

PART = "rank-00000-00000.safetensors"


def checked(path: Path) -> Manifest:
    manifest = read_manifest(path)
    check_parts(manifest)
    return manifest


def test_everything_is_read_again(tmp_path: Path, rank: Rank) -> None:
    manifest = checked(write(tmp_path, rank))
    assert manifest.state == run_state()
    assert manifest.tensors.keys() == STATE.keys()
    assert torch.equal(load_whole(manifest, "tables.t.weight"), TABLE)
    assert load_whole(manifest, "dense.over.bias").tolist() == [1.5, -2.0]
    assert float(load_whole(manifest, "optimizer.over.bias.step")) == 7.0


@pytest.mark.parametrize(
    ("bounds", "expected"), [((0, 4, 6), [1.0, 5.0]), ((0, 2, 6), [1.0, 3.0]), ((0, 6), [14 / 6])]
)
def test_row_state_follows_the_column_bounds(
    bounds: tuple[int, ...], expected: list[float], tmp_path: Path, rank: Rank
) -> None:
    name, values = "tables.t.momentum1", torch.tensor([[1.0, 5.0]]).repeat(10, 1)
    saver = Saver(tmp_path, keep=1, background=False, rank=rank)
    saver.save({name: LogicalTensor.whole(values)}, run_state())
    saver.close()
    pieces = [Piece((0, place), filled((10, 1))) for place in range(len(expected))]
    state = LogicalTensor((10, len(expected)), torch.float32, tuple(pieces))
    model = ModelState({}, {}, {}, {name: state}, {"t": bounds})
    load_model(checked(checkpoint_path(tmp_path, 5)), model)
    for piece, value in zip(pieces, expected, strict=True):
        torch.testing.assert_close(piece.tensor, torch.full((10, 1), value))


def test_large_pieces_become_many_parts(
    tmp_path: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for writing is that of a part."""
    small = 40
    monkeypatch.setattr("dlrm_sharded.checkpoint.storage.PART_BYTES", small)
    monkeypatch.setattr(logical.Piece.blocks, "__defaults__", (small,))
    manifest = checked(write(tmp_path, rank))
    assert len(manifest.files) > 5
    assert len(manifest.tensors["tables.t.weight"].blocks) == 5 + 2
    assert torch.equal(load_whole(manifest, "tables.t.weight"), TABLE)


@given(
    rows=st.tuples(st.integers(0, 10), st.integers(0, 10)).map(sorted),
    cols=st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted),
)
def test_any_rectangle_is_read(rows: list[int], cols: list[int], written: Manifest) -> None:
    """An empty one too."""
    piece = Piece((rows[0], cols[0]), filled((rows[1] - rows[0], cols[1] - cols[0])))
    PartReader(written).read_piece("tables.t.weight", piece)
    assert torch.equal(piece.tensor, TABLE[slice(*rows), slice(*cols)])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, rank: Rank) -> Manifest:
    return read_manifest(write(tmp_path_factory.mktemp("run"), rank))


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and make its checksum right."""
    fields = json.loads((path / FILE_NAME).read_text())
    del fields["crc32"]
    change(fields)
    (path / FILE_NAME).write_text(json.dumps({**fields, "crc32": _checksum(fields)}))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def lie(**fields: Any) -> Callable[[Path], None]:
    return lambda path: changed(path, lambda manifest: manifest.update(fields))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a part is missing": lambda path: (path / PART).unlink(),
    "a part is truncated": lambda path: os.truncate(path / PART, 50),
    "a part is longer": lambda path: os.truncate(path / PART, 5000),
    "a bit of a header": lambda path: flip(path / PART, 30),
    "a bit of a number": lambda path: flip(path / PART, -3),
    "a part is a folder": lambda path: ((path / PART).unlink(), (path / PART).mkdir()),
    "no manifest": lambda path: (path / FILE_NAME).unlink(),
    "an empty manifest": lambda path: os.truncate(path / FILE_NAME, 0),
    "a truncated manifest": lambda path: os.truncate(path / FILE_NAME, 300),
    "a bit of the manifest": lambda path: flip(path / FILE_NAME, 200),
    "a manifest that is a list": lambda path: (path / FILE_NAME).write_text("[]"),
    "a deep manifest": lambda path: (path / FILE_NAME).write_text("[" * 100_000),
    "another format": lie(format=99),
    "a path": lie(files={"../../etc/passwd": [1, 2]}),
    "an event file elsewhere": lie(events=["../events.out.tfevents.1", 2]),
    "a negative step": lie(step=-1),
    "text for a number": lie(step="5"),
    "no tensors": lambda path: changed(path, lambda manifest: manifest.pop("tensors")),
    "a gap": lambda path: changed(
        path, lambda manifest: manifest["tensors"]["tables.t.weight"]["blocks"].pop()
    ),
    "a block outside": lambda path: changed(
        path, lambda manifest: manifest["tensors"]["tables.t.weight"].update(shape=[9, 6])
    ),
    "an unknown part": lambda path: changed(path, lambda manifest: manifest["files"].pop(PART)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_recognized(
    damage: Callable[[Path], None], written: Manifest, tmp_path: Path
) -> None:
    path = tmp_path / written.folder.name
    shutil.copytree(written.folder, path)
    checked(path)
    damage(path)
    with pytest.raises(CheckpointError, match=written.folder.name):
        checked(path)


def test_a_shape_that_lies_is_an_error_when_it_is_read(written: Manifest, tmp_path: Path) -> None:
    """The checksums are right, but the file holds fewer numbers than the manifest says."""
    path = tmp_path / "step-0000000005"
    shutil.copytree(written.folder, path)

    def taller(manifest: dict[str, Any]) -> None:
        tensor = manifest["tensors"]["dense.over.bias"]
        tensor["shape"], tensor["blocks"][0][1] = [3], [3]

    changed(path, taller)
    with pytest.raises(CheckpointError, match=PART):
        load_whole(checked(path), "dense.over.bias")


def test_keeps_the_newest(tmp_path: Path, rank: Rank) -> None:
    for step in (1, 2, 4, 30):
        write(tmp_path, rank, step=step, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-0000000030", "step-0000000004"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-0000000030",
        "step-0000000004",
    }
