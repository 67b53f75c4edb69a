"""A checkpoint that cannot be written is a failure of the saving, not of the training."""

import errno
import itertools
import math
import threading
import time
from collections.abc import Mapping
from unittest.mock import Mock

import pytest
import torch

from dlrm_sharded.checkpoint import storage
from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.logical import LogicalTensor, Piece
from dlrm_sharded.checkpoint.manifest import RunState, check_parts, read_manifest
from dlrm_sharded.checkpoint.restore import load_whole
from dlrm_sharded.checkpoint.saver import CheckpointConfig, Saver
from dlrm_sharded.checkpoint.storage import check_finite
from dlrm_sharded.files.errors import DivergenceError, LostFolderError
from tests.unit.checkpoint.cases import STATE, TABLE, run_state, write


def save(saver: Saver, state: Mapping[str, LogicalTensor], said: RunState) -> None:
    saver.save(state, said)
    saver.finish()


@pytest.mark.parametrize("every", [{}, {"every_steps": 5}, {"every_s": 2.0}])
def test_an_interval_of_either_kind_enables_checkpoints(every):
    assert CheckpointConfig(**every).is_enabled == bool(every)


@pytest.mark.parametrize("background", [False, True])
def test_full_disk(background, tmp_path, rank, monkeypatch, caplog):
    """The last good checkpoint stays, nothing half-written does, and the next one is tried."""
    write(tmp_path, rank, 1)
    saver = Saver(tmp_path, keep=1, background=background, rank=rank)
    full = OSError(errno.ENOSPC, "No space left on device", "part")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_durably", Mock(side_effect=full))
        save(saver, STATE, run_state(2))
    assert "No space left on device" in str(saver.failure)
    assert "no checkpoint could be written" in caplog.text
    (good,) = (tmp_path / "checkpoints").iterdir()
    check_parts(read_manifest(good))
    saver.save(STATE, run_state(3))
    saver.close()
    assert saver.failure is None
    assert [path.name for path in checkpoints(tmp_path)] == ["step-0000000003"]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("tables.t.weight", [[1.0, math.nan]]),
        ("dense.over.bias", [math.inf]),
        ("optimizer.over.bias.step", -math.inf),
        ("dense.mask", [math.nan, -math.inf]),
    ],
)
def test_what_is_not_finite_is_never_written(name, bad, background, tmp_path, rank):
    write(tmp_path, rank, 1)
    state = {**STATE, name: LogicalTensor.whole(torch.tensor(bad))}
    saver = Saver(tmp_path, keep=1, background=background, rank=rank)
    with pytest.raises(DivergenceError, match=rf"1 of [12] values of {name} are not finite after"):
        save(saver, state, run_state(2, buffers=("dense.mask",)))
    with pytest.raises(DivergenceError):  # it stays so
        saver.save(STATE, run_state(3))
    (good,) = (tmp_path / "checkpoints").iterdir()
    check_finite(read_manifest(good))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("num_checks", [0, 1])
def test_nothing_is_written_to_a_folder_that_was_lost(num_checks, background, tmp_path, rank):
    """Also if it is lost while a checkpoint is being written."""
    write(tmp_path, rank, 1)
    lost = itertools.repeat(LostFolderError("another job has it"))
    check = Mock(side_effect=itertools.chain([None] * num_checks, lost))
    saver = Saver(tmp_path, keep=1, background=background, rank=rank, check_owner=check)
    with pytest.raises(LostFolderError):
        save(saver, STATE, run_state(2))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-0000000001"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1 + num_checks


def test_folder_that_cannot_be_made(tmp_path, rank):
    """A poll reports it once it is known, and does not wait for it."""
    (tmp_path / "checkpoints").write_text("in the way")
    may_write = threading.Event()
    saver = Saver(
        tmp_path, keep=1, background=True, rank=rank, check_owner=lambda: may_write.wait(1)
    )
    saver.save(STATE, run_state())
    saver.poll()
    assert saver.failure is None
    may_write.set()
    deadline = time.monotonic() + 600
    while saver.failure is None and time.monotonic() < deadline:
        saver.poll()
    assert "checkpoints" in str(saver.failure)
    saver.close()


def test_background_writes_what_was_there(tmp_path, rank):
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


def test_copies_are_blocks_of_the_size_of_a_part(tmp_path, rank, monkeypatch):
    """Page-locked memory of a power of two holds the full ones exactly."""
    asked = []
    empty = torch.empty

    def recorded(shape, **options):
        if "pin_memory" in options:
            asked.append(math.prod(shape) * options["dtype"].itemsize)
        return empty(shape, **options)

    monkeypatch.setattr(Piece.blocks, "__defaults__", (64,))
    monkeypatch.setattr(torch, "empty", recorded)
    table = torch.arange(44, dtype=torch.float32).reshape(11, 4)
    write(tmp_path, rank, 1, 2, state={"dense.t": LogicalTensor.whole(table)}, background=True)
    assert asked == [64, 64, 48], "made once, for both checkpoints"
    (path, _) = checkpoints(tmp_path)
    assert load_whole(read_manifest(path), "dense.t").equal(table)
