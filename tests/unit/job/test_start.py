"""What a run begins from, in folders whose checkpoints are damaged or diverged."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_sharded.checkpoint import storage
from dlrm_sharded.checkpoint.folder import checkpoint_path
from dlrm_sharded.checkpoint.logical import LogicalTensor
from dlrm_sharded.checkpoint.manifest import FILE_NAME
from dlrm_sharded.files.errors import CheckpointError, ConfigError
from dlrm_sharded.job import prepare as prepare_module
from dlrm_sharded.job.owned_folder import RunFolder
from dlrm_sharded.job.prepare import prepare
from dlrm_sharded.job.start import RUN_FILE, Start, find_start, note_start
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.checkpoint.cases import STATE, write


def begin_from(resume: str, run_dir: Path, rank: Rank, **config: Any) -> Start:
    config = {"seed": 0} | config  # that of the checkpoints
    folder = RunFolder(run_dir, lambda: None)
    settings: Any = SimpleNamespace(resume=resume, init_from=None, config=config)
    return find_start(settings, rank, folder)


def write_diverged(run_dir: Path, rank: Rank, *, step: int) -> Path:
    """Write NaN, as earlier versions did."""
    state = {**STATE, "dense.over.bias": LogicalTensor.whole(torch.tensor([1.0, math.nan]))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "num_not_finite", lambda *args, **kwargs: 0)
        return write(run_dir, rank, step, keep=9, state=state)


def test_goes_on_from_the_newest_good_one(tmp_path, rank):
    """What is damaged is to be renamed. A checkpoint of a later format is not damaged."""
    write(tmp_path, rank, 1, 2, 3, 5, keep=9)
    write_diverged(tmp_path, rank, step=4)
    (checkpoint_path(tmp_path, 3) / FILE_NAME).write_text(json.dumps({"format": 2}))
    (checkpoint_path(tmp_path, 5) / FILE_NAME).unlink()
    start = begin_from("auto", tmp_path, rank)
    assert start.step == 2
    assert start.damaged == (checkpoint_path(tmp_path, 5), checkpoint_path(tmp_path, 4))


def test_what_a_disk_refuses_to_read_is_not_called_damaged(tmp_path, rank, monkeypatch):
    """It is skipped, and not renamed, because the disk may work again tomorrow."""
    write(tmp_path, rank, 1, 2, 3, keep=9)
    manifest = checkpoint_path(tmp_path, 3) / FILE_NAME
    (part,) = checkpoint_path(tmp_path, 2).glob("rank-*")

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: str | Path, *arguments: Any, **options: Any) -> Any:
            if Path(path) in (manifest, part):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return call(path, *arguments, **options)

        return refuse

    monkeypatch.setattr(Path, "open", refusing(Path.open))
    start = begin_from("auto", tmp_path, rank)
    assert (start.step, start.damaged) == (1, ())


def test_checkpoints_and_none_good_is_an_error(tmp_path, rank):
    (write(tmp_path, rank, 1) / FILE_NAME).unlink()
    newest = write_diverged(tmp_path, rank, step=2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as raised:
        begin_from("auto", tmp_path, rank)
    assert str(raised.value).startswith(
        f"no checkpoint in {tmp_path / 'checkpoints'} can be used (2 found); the newest: {newest} "
        "is from a training that diverged: dense.over.bias has 1 values that are not finite; move "
    )
    with pytest.raises(CheckpointError, match=r"over\.bias has 1 values that are not finite$"):
        begin_from(str(newest), tmp_path / "new", rank)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_old_checkpoint_under_a_later_name_does_not_count(tmp_path, rank, caplog):
    """The run would begin there at every start, whatever it has written since."""
    write(tmp_path, rank, 1, 2, keep=9)
    renamed = checkpoint_path(tmp_path, 7)
    renamed.symlink_to(checkpoint_path(tmp_path, 1))
    start = begin_from("auto", tmp_path, rank)
    assert (start.step, start.damaged) == (2, ())
    assert f"{renamed} is the checkpoint of step-0000000001; rename it" in caplog.text


def test_goes_on_with_what_it_was_trained_with(tmp_path, rank, caplog):
    config = {"seed": 0, "data": {"alpha": 0.9}, "optimizer": {"dense_learning_rate": 0.01}}
    newest = write(tmp_path, rank, 7, config=config)
    changed = config | {"optimizer": {"dense_learning_rate": 0.02}}
    assert begin_from("auto", tmp_path, rank, **changed).step == 7
    assert (
        f"from {newest.name} on, the run has another config: optimizer.dense_learning_rate is 0.02 "
        "and was 0.01"
    ) in caplog.text
    with pytest.raises(CheckpointError) as raised:
        begin_from("auto", tmp_path, rank, **changed | {"data": {"alpha": 0.2}, "seed": 1})
    assert str(raised.value) == (
        f"{newest} was trained with another config: data.alpha is 0.2 and was 0.9, seed is 1 and "
        "was 0; resume with that of the checkpoint, or take the weights alone with init_from"
    )


def test_checkpoints_of_another_run_alone(tmp_path, rank):
    write(tmp_path, rank)
    (tmp_path / RUN_FILE).write_text(json.dumps({"run": "this run", "starts": [{}]}))
    with pytest.raises(CheckpointError, match="belongs to another run; move"):
        begin_from("auto", tmp_path, rank)


def test_killed_in_the_first_save(tmp_path, rank):
    (tmp_path / "checkpoints" / ".step-0000000010.partial").mkdir(parents=True)
    start = begin_from("auto", tmp_path, rank)
    assert start == Start(start.run)


@pytest.mark.parametrize(
    "notes",
    ["", "\0" * 40, "[]", '{"run": "the run"}', '{"run": "the run", "starts": 5}'],
    ids=repr,
)
def test_damaged_notes_do_not_hold_up_a_run(notes, tmp_path, rank):
    """A crash of the host can leave them so; its checkpoints say which run it is."""
    write(tmp_path, rank, 7)
    (tmp_path / RUN_FILE).write_text(notes)
    start = begin_from("auto", tmp_path, rank)
    assert (start.run, start.step, start.num_interruptions) == ("the run", 7, 1)
    note_start(tmp_path, start, world_size=1)
    noted = json.loads((tmp_path / RUN_FILE).read_text())
    assert [noted["run"], *(entry["step"] for entry in noted["starts"])] == ["the run", 7]


class Unopened:
    """A dataset whose conversion would take hours."""

    def num_batches(self, split: str) -> int:
        raise AssertionError("the data was opened")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("resume", None, "already has a run; give another hydra.run.dir"),
        ("resume", "/no/such/run", "resume is '/no/such/run', which is neither a checkpoint nor"),
        ("init_from", "/no/such/run", "init_from is '/no/such/run', which is neither"),
    ],
)
def test_what_a_run_cannot_begin_from_is_refused_before_its_data(
    key, value, reason, tmp_path, rank, monkeypatch
):
    monkeypatch.setattr(prepare_module, "context_of_job", lambda *_: None)
    if value is None:
        (tmp_path / "plan.json").touch()
    settings = SimpleNamespace(
        optimizer=SimpleNamespace(embedding="sgd"),
        cost_model_snapshot=None,
        journal=None,
        planner=SimpleNamespace(planner=lambda context: None),
        dataset=Unopened(),
        config={"seed": 0},
        **{"resume": "never", "init_from": None, key: value},
    )
    with pytest.raises((ConfigError, CheckpointError), match=reason):
        prepare(settings, rank, RunFolder(tmp_path, lambda: None))
