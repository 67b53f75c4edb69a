"""Exported weights are read by the safetensors library, and are those of the checkpoint."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dlrm_sharded.checkpoint import storage
from dlrm_sharded.checkpoint import weights_export as exports
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import FILE_NAME, Manifest, read_manifest
from dlrm_sharded.commands.export import main
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.checkpoint.cases import PART, write
from tests.unit.conftest import RunCommand

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


def write_model(
    run_dir: Path, rank: Rank, *, step: int = 5, add: float = 0.0, best_step: int | None = None
) -> Path:
    """Write a checkpoint whose first table is in two column shards."""
    state = {name: LogicalTensor.whole(tensor) for name, tensor in TENSORS.items()}
    table = TABLE + add
    pieces = (Piece((0, 0), table[:, :4]), Piece((0, 4), table[:, 4:]))
    state["tables.t.weight"] = LogicalTensor((1000, 6), torch.float32, pieces)
    return write(run_dir, rank, step, keep=5, state=state, best_step=best_step)


@pytest.fixture
def export(run_command: RunCommand) -> Callable[[Path, Path], str]:
    """Exports into a folder; returns the message of an export that is refused, or else nothing."""

    def run(given: Path, out: Path) -> str:
        done = run_command(main, given, f"out={out}")
        assert done.returncode == (2 if done.stderr else 0)
        return done.stderr

    return run


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


def test_weights_alone_are_exported_a_block_of_rows_at_a_time(tmp_path, rank, export, monkeypatch):
    largest = 700
    sizes = []

    def spied(manifest, wanted):
        [[piece]] = wanted.values()
        sizes.append(piece.tensor.nbytes)
        storage.read_pieces(manifest, wanted)

    monkeypatch.setattr(exports, "BLOCK_BYTES", largest)
    monkeypatch.setattr(exports, "read_pieces", spied)
    out = tmp_path / "new" / "model"
    assert export(write_model(tmp_path / "run", rank), out) == ""
    assert max(sizes) <= largest < TABLE.nbytes / 30
    check_equal(exported(out))
    tables = {f"table-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    assert {p.name for p in out.iterdir()} == {exports.DENSE_FILE, exports.INDEX_FILE} | tables
    assert [*out.parent.iterdir()] == [out]


def test_newest_good_checkpoint_of_a_run(tmp_path, rank, export, caplog):
    for step, add in ((5, 0.0), (10, 1.0), (20, 2.0)):
        newest = write_model(tmp_path, rank, step=step, add=add)
    os.truncate(newest / PART, 100)
    assert export(tmp_path, tmp_path / "model") == ""
    assert "skipped a checkpoint" in caplog.text
    assert newest.name in caplog.text
    check_equal(exported(tmp_path / "model"), add=1.0)


def test_best_checkpoint_of_a_run(tmp_path, rank, export, caplog):
    """As the newest one notes it. Where it is missing or damaged, the newest good one counts."""
    best = write_model(tmp_path, rank, step=5, add=1.0, best_step=5)
    write_model(tmp_path, rank, step=10, add=2.0, best_step=5)
    newest = write_model(tmp_path, rank, step=20, add=3.0, best_step=5)
    assert export(tmp_path, tmp_path / "best") == export(newest, tmp_path / "newest") == ""
    check_equal(exported(tmp_path / "best"), add=1.0)
    check_equal(exported(tmp_path / "newest"), add=3.0)
    assert "best checkpoint" not in caplog.text
    os.truncate(newest / FILE_NAME, 100)
    assert export(tmp_path, tmp_path / "again") == ""
    check_equal(exported(tmp_path / "again"), add=1.0)
    os.truncate(best / PART, 100)
    assert export(tmp_path, tmp_path / "without") == ""
    check_equal(exported(tmp_path / "without"), add=2.0)
    shutil.rmtree(best)
    assert export(tmp_path, tmp_path / "missing") == ""
    check_equal(exported(tmp_path / "missing"), add=2.0)
    assert f"the best checkpoint, {best}, no longer exists; the newest is used" in caplog.messages


def test_weights_that_are_not_finite_are_refused(tmp_path, rank, export, monkeypatch, caplog):
    """An earlier version has written them. Those of a run are skipped, like damaged ones."""
    out = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr(storage, "num_not_finite", lambda *args, **kwargs: 0)
        bad = write_model(tmp_path, rank, step=10, add=math.nan)
        assert export(bad, out) == ""
        shutil.rmtree(out)
    message = "tables.t.weight has 6,000 values that are not finite"
    assert message in export(bad, out)
    assert not out.exists()
    write_model(tmp_path, rank)
    assert export(tmp_path, out) == ""
    assert message in caplog.text
    check_equal(exported(out))


def test_errors_are_one_message_and_leave_nothing(tmp_path, rank, export):
    checkpoint = write_model(tmp_path / "run", rank)
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    file.touch()
    for given, out, message in (
        (checkpoint, taken, f"{taken} exists already"),
        (checkpoint, file / "model", "file is not a folder"),
        (tmp_path, tmp_path / "model", f"{tmp_path} is neither a checkpoint nor a run's folder"),
    ):
        error = export(given, out)
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1
    os.truncate(checkpoint / PART, 100)
    assert "is damaged" in export(checkpoint, tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken", "file"}


def test_exports_into_one_folder_do_not_mix(tmp_path, rank, monkeypatch):
    """The second one begins and ends while the first one is about to end."""
    first, second = (
        read_manifest(write_model(tmp_path / "run", rank, step=step, add=float(step)))
        for step in (5, 10)
    )
    out, write_file = tmp_path / "model", exports._write_file

    def in_turns(path: Path, manifest: Manifest, names: Mapping[str, str]) -> None:
        write_file(path, manifest, names)
        if manifest is first and path.name.startswith("table-00003"):
            exports.export(second, out)

    monkeypatch.setattr(exports, "_write_file", in_turns)
    with pytest.raises(DataError, match=f"{out} was written by another export"):
        exports.export(first, out)
    check_equal(exported(out), add=10.0)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model"}
