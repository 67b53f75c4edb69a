"""A checkpoint that cannot be written is a failure of the saving, not of the training."""

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.checkpoint import storage
from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.manifest import check_parts, read_manifest
from dlrm_sharded.checkpoint.restore import load_whole
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.distributed import Rank
from tests.unit.checkpoint.cases import STATE, TABLE, run_state, write


@pytest.mark.parametrize("background", [False, True])
def test_full_disk(
    background: bool,
    tmp_path: Path,
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The last good checkpoint stays, nothing half-written does, and the next one is tried."""
    write(tmp_path, rank, step=1)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "part")

    saver = Saver(tmp_path, keep=1, background=background, rank=rank)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(storage, "_write_durably", full)
        saver.save(STATE, run_state(2))
        saver.finish()
    assert saver.failure is not None
    assert "No space left on device" in saver.failure
    assert "no checkpoint could be written" in caplog.text
    (good,) = (tmp_path / "checkpoints").iterdir()
    check_parts(read_manifest(good))
    saver.save(STATE, run_state(3))
    saver.close()
    assert saver.failure is None
    assert [path.name for path in checkpoints(tmp_path)] == ["step-0000000003"]


def test_folder_that_cannot_be_made(tmp_path: Path, rank: Rank) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    saver = Saver(tmp_path, keep=1, background=True, rank=rank)
    saver.save(STATE, run_state())
    saver.close()
    assert saver.failure is not None
    assert "checkpoints" in saver.failure


def test_removed_folder_is_made_again(tmp_path: Path, rank: Rank) -> None:
    run_dir = tmp_path / "run"
    write(run_dir, rank, step=1)
    run_dir.rename(tmp_path / "away")
    write(run_dir, rank, step=2)
    assert [path.name for path in checkpoints(run_dir)] == ["step-0000000002"]


def test_background_writes_what_was_there(tmp_path: Path, rank: Rank) -> None:
    """The training goes on with the tensors while they are written."""
    saver = Saver(tmp_path, keep=1, background=True, rank=rank)
    saver.save(STATE, run_state())
    before = TABLE.clone()
    try:
        TABLE.zero_()
        saver.close()
    finally:
        TABLE.copy_(before)
    (path,) = checkpoints(tmp_path)
    assert load_whole(read_manifest(path), "tables.t.weight").equal(before)
