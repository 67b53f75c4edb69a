"""What is written is read again, in other pieces; what is damaged is recognized."""

import logging
import math
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_sharded.checkpoint import logical
from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import FILE_NAME, Manifest, check_parts, read_manifest
from dlrm_sharded.checkpoint.model_state import ModelState
from dlrm_sharded.checkpoint.restore import load_model, load_weights, load_whole
from dlrm_sharded.checkpoint.storage import read_pieces
from dlrm_sharded.files.errors import CheckpointError
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.checkpoint.cases import PART, STATE, TABLE, lie, run_state, write


def checked(path: Path) -> Manifest:
    manifest = read_manifest(path)
    check_parts(manifest)
    return manifest


def test_everything_is_read_again(tmp_path, rank):
    manifest = checked(write(tmp_path, rank))
    assert manifest.state == run_state()
    assert manifest.tensors.keys() == STATE.keys()
    assert torch.equal(load_whole(manifest, "tables.t.weight"), TABLE)
    assert load_whole(manifest, "dense.over.bias").tolist() == [1.5, -2.0]
    assert float(load_whole(manifest, "optimizer.over.bias.step")) == 7.0


@pytest.mark.parametrize(
    ("bounds", "expected"), [((0, 4, 6), [1.0, 5.0]), ((0, 2, 6), [1.0, 3.0]), ((0, 6), [14 / 6])]
)
def test_row_state_follows_the_column_bounds(bounds, expected, tmp_path, rank, caplog):
    name, values = "tables.t.momentum1", torch.tensor([[1.0, 5.0]]).repeat(10, 1)
    checkpoint = write(tmp_path, rank, state={name: LogicalTensor.whole(values)})
    pieces = [Piece((0, place), torch.full((10, 1), math.nan)) for place in range(len(expected))]
    state = LogicalTensor((10, len(expected)), torch.float32, tuple(pieces))
    model = ModelState({}, {}, {}, {name: state}, {"t": bounds})
    with caplog.at_level(logging.INFO):
        load_model(checked(checkpoint), model)
    assert ("of 1 tables was converted" in caplog.text) == (bounds != (0, 4, 6))
    for piece, value in zip(pieces, expected, strict=True):
        torch.testing.assert_close(piece.tensor, torch.full((10, 1), value))


@pytest.mark.parametrize("load", [load_model, load_weights])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_table_is_read_in_the_precision_of_its_plan(dtype, load, tmp_path, rank):
    name, other = "tables.t.weight", ({torch.float32, torch.float16} - {dtype}).pop()
    written = LogicalTensor.whole((TABLE / 7).to(dtype))
    read = LogicalTensor.whole(torch.zeros(10, 6, dtype=other))
    load(
        checked(write(tmp_path, rank, state={name: written})),
        ModelState({name: read}, {}, {}, {}, {}),
    )
    assert torch.equal(read.pieces[0].tensor, written.pieces[0].tensor.to(other))


def test_large_pieces_become_many_parts(tmp_path, rank, monkeypatch):
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
def test_any_rectangle_is_read(rows, cols, written):
    """An empty one too."""
    shape = rows[1] - rows[0], cols[1] - cols[0]
    piece = Piece((rows[0], cols[0]), torch.full(shape, float("nan")))
    read_pieces(written, {"tables.t.weight": [piece]})
    assert torch.equal(piece.tensor, TABLE[slice(*rows), slice(*cols)])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, rank: Rank) -> Manifest:
    return read_manifest(write(tmp_path_factory.mktemp("run"), rank))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


def pickled_part(path: Path) -> None:
    content = pickle.dumps(list(range(1000)))
    (path / PART).write_bytes(content)
    entry = [len(content), zlib.crc32(content)]
    lie(path, lambda manifest: manifest["files"].update({PART: entry}))


def table_with(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Let the manifest say something else of the table, with its checksum."""
    return lambda path: lie(path, lambda manifest: change(manifest["tensors"]["tables.t.weight"]))


def said(**fields: Any) -> Callable[[Path], None]:
    return lambda path: lie(path, lambda manifest: manifest.update(fields))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a part is missing": lambda path: (path / PART).unlink(),
    "a part is truncated": lambda path: os.truncate(path / PART, 50),
    "a part is longer": lambda path: os.truncate(path / PART, 5000),
    "a bit of a header": lambda path: flip(path / PART, 30),
    "a bit of a number": lambda path: flip(path / PART, -3),
    "a part is a folder": lambda path: ((path / PART).unlink(), (path / PART).mkdir()),
    "a pickled part with its checksum": pickled_part,
    "another dtype": table_with(lambda table: table.update(dtype="float64")),
    "no manifest": lambda path: (path / FILE_NAME).unlink(),
    "an empty manifest": lambda path: os.truncate(path / FILE_NAME, 0),
    "a truncated manifest": lambda path: os.truncate(path / FILE_NAME, 300),
    "a bit of the manifest": lambda path: flip(path / FILE_NAME, 200),
    "a manifest that is a list": lambda path: (path / FILE_NAME).write_text("[]"),
    "a deep manifest": lambda path: (path / FILE_NAME).write_text("[" * 100_000),
    "another format": said(format=99),
    "a path": said(files={"../../etc/passwd": [1, 2]}),
    "an event file elsewhere": said(events=["../events.out.tfevents.1", 2]),
    "a negative step": said(step=-1),
    "text for a number": said(step="5"),
    "no tensors": lambda path: lie(path, lambda manifest: manifest.pop("tensors")),
    "a gap": table_with(lambda table: table["blocks"].pop()),
    "a block outside": table_with(lambda table: table.update(shape=[9, 6])),
    "an unknown part": lambda path: lie(path, lambda manifest: manifest["files"].pop(PART)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_recognized(damage, written, tmp_path):
    path = tmp_path / written.folder.name
    shutil.copytree(written.folder, path)
    checked(path)
    damage(path)
    with pytest.raises(CheckpointError, match=written.folder.name):
        checked(path)


def test_keeps_the_newest(tmp_path, rank):
    for step in (1, 2, 4, 30):
        write(tmp_path, rank, step, keep=2)
    kept = checkpoints(tmp_path)
    assert [path.name for path in kept] == ["step-0000000030", "step-0000000004"]
    assert {*(tmp_path / "checkpoints").iterdir()} == {*kept}
