"""Checkpoints in an object store of which every tenth request fails."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dlrm_sharded.checkpoint.folder import checkpoints, make_partial, set_aside
from dlrm_sharded.checkpoint.manifest import FILE_NAME, check_parts, read_manifest
from dlrm_sharded.checkpoint.restore import load_whole
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.checkpoint.storage import check_finite
from dlrm_sharded.files import remote_files
from dlrm_sharded.files.errors import DamagedCheckpointError
from dlrm_sharded.files.remote_files import RemotePath
from dlrm_sharded.job.owned_folder import RunFolder
from dlrm_sharded.job.start import find_start
from dlrm_sharded.runs.remote_copy import RemoteCopy
from tests.object_store import store, web_hdfs
from tests.unit.checkpoint.cases import PART, STATE, TABLE, run_state, steps_in, write


@pytest.fixture(params=["webhdfs", "memory"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemotePath]:
    with store(request.param, tmp_path) as url:
        yield RemotePath(url) / "run"


@pytest.mark.parametrize("background", [False, True])
def test_written_checked_and_read(background, home, rank):
    write(home, rank, 1, 2, 3, background=background)
    assert steps_in(home) == [3, 2]
    manifest = read_manifest(checkpoints(home)[0])
    check_parts(manifest)
    check_finite(manifest)
    assert load_whole(manifest, "tables.t.weight").equal(TABLE)


def test_an_upload_that_was_cut_off_is_no_checkpoint(home, rank):
    write(home, rank, 1)
    (write(home, rank, 2) / FILE_NAME).delete()
    assert steps_in(home) == [1]
    write(home, rank, 3)
    assert {*(home / "checkpoints").entries()} == {"step-0000000001", "step-0000000003"}, (
        "what was cut off is removed"
    )


def test_a_run_writes_a_step_again(home, rank):
    write(home, rank, 1, 2)
    write(home, rank, 2)
    assert steps_in(home) == [2, 1]
    check_parts(read_manifest(checkpoints(home)[0]))


def test_another_run_of_the_same_step_is_set_aside(home, rank, monkeypatch):
    """A user may have no right to rename it; then it stays."""
    write(home, rank, 2, run="another")
    with monkeypatch.context() as patched:
        patched.setattr(RemotePath, "rename", Mock(side_effect=PermissionError(1, "no right")))
        with pytest.raises(FileExistsError, match="another run has it"):
            make_partial(home / "checkpoints" / "step-0000000002", run="the run")
    write(home, rank, 2)
    folder = home / "checkpoints"
    assert {*folder.entries()} == {"step-0000000002", "set-aside-step-0000000002"}
    assert read_manifest(folder / "set-aside-step-0000000002").state.run == "another"


def test_goes_on_from_the_newest_good_one(home, rank, tmp_path):
    write(home, rank, 1, 2)
    damaged = home / "checkpoints" / "step-0000000002"
    (damaged / PART).write_bytes((damaged / PART).read_bytes()[:100])
    folder = RunFolder(tmp_path / "here", lambda: None, RemoteCopy(tmp_path / "here", home))
    settings: Any = SimpleNamespace(resume="auto", init_from=None, config={"seed": 0})
    start = find_start(settings, rank, folder)
    assert (start.step, start.run) == (1, "the run")
    assert start.damaged == (damaged,)
    set_aside(damaged)
    assert steps_in(home) == [1]


def test_a_part_that_is_gone(home, rank):
    path = write(home, rank)
    (path / PART).delete()
    with pytest.raises(DamagedCheckpointError, match="No such file or directory"):
        check_parts(read_manifest(path))


def test_a_store_that_is_gone_is_a_failure_of_the_saving(tmp_path, rank, monkeypatch, caplog):
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.0,))
    with web_hdfs(tmp_path, every=1) as url:
        saver = Saver(RemotePath(url) / "run", keep=1, background=False, rank=rank)
        saver.save(STATE, run_state())
    assert "503" in str(saver.failure)
    assert "the training goes on" in caplog.text
