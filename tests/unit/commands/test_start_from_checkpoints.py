"""What a run begins from, in folders whose checkpoints are damaged or diverged."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from dlrm_sharded.checkpoint import storage
from dlrm_sharded.checkpoint.folder import checkpoint_path
from dlrm_sharded.checkpoint.logical import LogicalTensor
from dlrm_sharded.checkpoint.manifest import FILE_NAME
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.commands.start import RUN_FILE, Start, find_start
from dlrm_sharded.distributed import Rank, process_group
from dlrm_sharded.errors import CheckpointError
from tests.unit.checkpoint.cases import STATE, run_state, write


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    with process_group() as me:
        yield me


def config(resume: str) -> DictConfig:
    return OmegaConf.create({"resume": resume, "init_from": None, "batch_size": 4, "seed": 0})


def write_diverged(run_dir: Path, rank: Rank, *, step: int) -> Path:
    """Write NaN, as earlier versions did."""
    state = {**STATE, "dense.over.bias": LogicalTensor.whole(torch.tensor([1.0, math.nan]))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "num_not_finite", lambda *args, **kwargs: 0)
        saver = Saver(run_dir, keep=9, background=False, rank=rank)
        saver.save(state, run_state(step))
        saver.close()
    return checkpoint_path(run_dir, step)


def test_goes_on_from_the_newest_good_one(tmp_path: Path, rank: Rank) -> None:
    """What is damaged is to be set aside. A checkpoint of a later format is not damaged."""
    for step in (1, 2, 3, 5):
        write(tmp_path, rank, step=step, keep=9)
    write_diverged(tmp_path, rank, step=4)
    (checkpoint_path(tmp_path, 3) / FILE_NAME).write_text(json.dumps({"format": 2}))
    (checkpoint_path(tmp_path, 5) / FILE_NAME).unlink()
    start = find_start(config("auto"), tmp_path, rank)
    assert start.step == 2
    assert start.damaged == (checkpoint_path(tmp_path, 5), checkpoint_path(tmp_path, 4))


def test_checkpoints_and_none_good_is_an_error(tmp_path: Path, rank: Rank) -> None:
    (write(tmp_path, rank, step=1) / FILE_NAME).unlink()
    newest = write_diverged(tmp_path, rank, step=2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as raised:
        find_start(config("auto"), tmp_path, rank)
    assert str(raised.value).startswith(
        f"no checkpoint in {tmp_path / 'checkpoints'} can be used (2 found); the newest: {newest} "
        "is of a training that diverged: dense.over.bias has 1 values that are not finite; move "
    )
    with pytest.raises(CheckpointError, match=r"over\.bias has 1 values that are not finite$"):
        find_start(config(str(newest)), tmp_path / "new", rank)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_old_checkpoint_under_a_later_name_does_not_count(
    tmp_path: Path, rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    """The run would begin there at every start, whatever it has written since."""
    for step in (1, 2):
        write(tmp_path, rank, step=step, keep=9)
    renamed = checkpoint_path(tmp_path, 7)
    renamed.symlink_to(checkpoint_path(tmp_path, 1))
    start = find_start(config("auto"), tmp_path, rank)
    assert (start.step, start.damaged) == (2, ())
    assert f"{renamed} is the checkpoint of step-0000000001; rename it" in caplog.text


def test_checkpoints_of_another_run_alone(tmp_path: Path, rank: Rank) -> None:
    write(tmp_path, rank)
    (tmp_path / RUN_FILE).write_text(json.dumps({"run": "this run", "starts": [{}]}))
    with pytest.raises(CheckpointError, match="belongs to another run; move"):
        find_start(config("auto"), tmp_path, rank)


def test_killed_in_the_first_save(tmp_path: Path, rank: Rank) -> None:
    (tmp_path / "checkpoints" / ".step-0000000010.partial").mkdir(parents=True)
    start = find_start(config("auto"), tmp_path, rank)
    assert start == Start(start.run)
