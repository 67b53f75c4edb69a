"""Exported weights are read by the safetensors library, and are those of the checkpoint."""

import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dlrm_sharded.checkpoint import export as exports
from dlrm_sharded.checkpoint import storage
from dlrm_sharded.checkpoint.folder import checkpoint_path
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import Manifest
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.commands.export import main
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.checkpoint.cases import run_state

EVIL = "../../ä\n/evil"
TABLE = torch.randn(1000, 6)
TENSORS = {
    "tables.t.weight": TABLE,
    "tables.dense.weight": torch.arange(8.0).reshape(8, 1),
    f"tables.{EVIL}.weight": torch.arange(6.0).reshape(2, 3),
    "dense.over.bias": torch.tensor([1.5, -2.0]),
    "dense.over.half": torch.tensor([[1.5], [-2.0]]).bfloat16(),
    "dense.over.count": torch.tensor(7),
    "tables.t.momentum1": torch.ones(1000, 1),
    "optimizer.over.bias.step": torch.tensor(7.0),
    "ranks.0.torch": torch.zeros(5, dtype=torch.uint8),
}
WEIGHTS = ("over.bias", "over.half", "over.count")
TABLES = tuple(n for n in TENSORS if n.startswith("tables.") and n.endswith(".weight"))


def write(run_dir: Path, rank: Rank, *, step: int = 5, add: float = 0.0) -> Path:
    """Write a checkpoint whose first table is in two column shards."""
    state = {name: LogicalTensor.whole(tensor) for name, tensor in TENSORS.items()}
    table = TABLE + add
    pieces = (Piece((0, 0), table[:, :4]), Piece((0, 4), table[:, 4:]))
    state["tables.t.weight"] = LogicalTensor((1000, 6), torch.float32, pieces)
    saver = Saver(run_dir, keep=5, background=False, rank=rank)
    saver.save(state, run_state(step))
    saver.close()
    assert saver.failure is None
    return checkpoint_path(run_dir, step)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["dlrm-export", *map(str, arguments)])
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def exported(folder: Path) -> dict[str, Tensor]:
    """All tensors that the index names, from the files that it names."""
    index = json.loads((folder / exports.INDEX_FILE).read_text())
    tensors = {}
    for name, file in index["weight_map"].items():
        assert "/" not in file
        with safe_open(folder / file, framework="pt") as opened:
            tensors[name] = opened.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def check_equal(tensors: dict[str, Tensor], *, add: float = 0.0) -> None:
    assert tensors.keys() == {*WEIGHTS, *TABLES}
    for name in WEIGHTS:
        assert torch.equal(tensors[name], TENSORS[f"dense.{name}"]), name
        assert tensors[name].dtype == TENSORS[f"dense.{name}"].dtype
    for name in TABLES[1:]:
        assert torch.equal(tensors[name], TENSORS[name]), name
    assert torch.equal(tensors["tables.t.weight"], TABLE + add)


def test_weights_alone_are_exported_a_block_of_rows_at_a_time(
    tmp_path: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 700
    sizes = []

    def spied(manifest: Manifest, wanted: Mapping[str, Sequence[Piece]]) -> None:
        [[piece]] = wanted.values()
        sizes.append(piece.tensor.nbytes)
        storage.read_pieces(manifest, wanted)

    monkeypatch.setattr(exports, "BLOCK_BYTES", largest)
    monkeypatch.setattr(exports, "read_pieces", spied)
    checkpoint = write(tmp_path / "run", rank)
    assert run(monkeypatch, checkpoint, f"out={tmp_path / 'new' / 'model'}") == 0
    assert max(sizes) <= largest < TABLE.nbytes / 30
    check_equal(exported(tmp_path / "new" / "model"))
    names = {path.name for path in (tmp_path / "new" / "model").iterdir()}
    tables = {f"table-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert names == {exports.DENSE_FILE, exports.INDEX_FILE} | tables
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]


def test_newest_good_checkpoint_of_a_run(
    tmp_path: Path,
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step, add in ((5, 0.0), (10, 1.0), (20, 2.0)):
        newest = write(tmp_path, rank, step=step, add=add)
    os.truncate(newest / "rank-00000-00000.safetensors", 100)
    with caplog.at_level(logging.WARNING):
        assert run(monkeypatch, tmp_path, f"out={tmp_path / 'model'}") == 0
    assert "passed over" in caplog.text
    assert newest.name in caplog.text
    check_equal(exported(tmp_path / "model"), add=1.0)


def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path,
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An earlier version has written them. Those of a run are passed over, like damaged ones."""
    with monkeypatch.context() as patch:
        patch.setattr(storage, "num_not_finite", lambda *args, **kwargs: 0)
        bad = write(tmp_path, rank, step=10, add=math.nan)
        assert run(monkeypatch, bad, f"out={tmp_path / 'model'}") == 0
        shutil.rmtree(tmp_path / "model")
    assert run(monkeypatch, bad, f"out={tmp_path / 'model'}") == 2
    message = "tables.t.weight has 6,000 values that are not finite"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    write(tmp_path, rank, step=5)
    with caplog.at_level(logging.WARNING):
        assert run(monkeypatch, tmp_path, f"out={tmp_path / 'model'}") == 0
    assert message in caplog.text
    check_equal(exported(tmp_path / "model"))


def test_errors_are_one_message_and_leave_nothing(
    tmp_path: Path,
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = write(tmp_path / "run", rank)
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    file.write_text("")
    for given, out, message in (
        (checkpoint, taken, f"{taken} exists already"),
        (checkpoint, file / "model", "Not a directory"),
        (tmp_path, tmp_path / "model", f"{tmp_path} is neither a checkpoint nor a run's folder"),
    ):
        assert run(monkeypatch, given, f"out={out}") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1
    os.truncate(checkpoint / "rank-00000-00000.safetensors", 100)
    assert run(monkeypatch, checkpoint, f"out={tmp_path / 'model'}") == 2
    assert "is damaged" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken", "file"}


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path,
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = write(tmp_path / "run", rank)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run(monkeypatch, checkpoint, f"out={tmp_path / 'model'}") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
