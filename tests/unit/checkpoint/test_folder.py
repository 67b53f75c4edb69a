"""Only whole checkpoints of a run count, and damaged ones are renamed."""

import errno
import os
from pathlib import Path

import pytest

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.manifest import FILE_NAME, check_parts, read_manifest
from dlrm_sharded.checkpoint.saver import Saver
from tests.unit.checkpoint.cases import PART, STATE, lie, run_state, steps_in, write


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


UNCOUNTED = {
    "damaged": lambda path: os.truncate(path / PART, 100),
    "another run": lambda path: lie(path, lambda fields: fields.update(run="another")),
    "later format": lambda path: (path / FILE_NAME).write_text('{"format": 2, "checksum": "new"}'),
}


@pytest.mark.parametrize("harm", UNCOUNTED)
def test_new_checkpoints_stay_below_higher_steps(harm, tmp_path, rank):
    write(tmp_path, rank, 90, 100)
    for path in checkpoints(tmp_path):
        UNCOUNTED[harm](path)
    write(tmp_path, rank, 10, 20, 30)
    assert steps_in(tmp_path) == [100, 90, 30, 20]


@pytest.mark.parametrize("harm", UNCOUNTED)
def test_older_ones_that_do_not_count(harm, tmp_path, rank):
    """A damaged checkpoint takes no good one's place and is removed with those before it."""
    write(tmp_path, rank, 1, 2)
    UNCOUNTED[harm](checkpoints(tmp_path)[0])
    write(tmp_path, rank, 3)
    assert steps_in(tmp_path) == [3, 2, 1]
    write(tmp_path, rank, 4)
    assert steps_in(tmp_path) == ([4, 3] if harm == "damaged" else [4, 3, 2])


def test_the_best_one_is_kept_beside_the_newest(tmp_path, rank):
    """Also by a process that has not written it; until another one is the best."""
    write(tmp_path, rank, 1)
    write(tmp_path, rank, 2, 3, 4, keep=1, best_step=2)
    assert steps_in(tmp_path) == [4, 2]
    write(tmp_path, rank, 5, 6, best_step=2)
    assert steps_in(tmp_path) == [6, 5, 2]
    write(tmp_path, rank, 7, best_step=7)
    assert steps_in(tmp_path) == [7, 6]
    write(tmp_path, rank, 8, best_step=3)
    assert steps_in(tmp_path) == [8, 7]


def test_a_damaged_one_of_the_same_step_is_set_aside(tmp_path, rank):
    for _ in range(2):
        (write(tmp_path, rank, 7) / FILE_NAME).unlink()
    write(tmp_path, rank, 7)
    aside = "set-aside-step-0000000007"
    assert names_in(tmp_path / "checkpoints") == [aside, f"{aside}-2", "step-0000000007"]
    check_parts(read_manifest(checkpoints(tmp_path)[0]))


def test_files_and_links_in_the_place_of_checkpoints(tmp_path, rank):
    """They are neither in the way, nor is anything deleted that a link leads to."""
    elsewhere = write(tmp_path / "elsewhere", rank, 1)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-0000000001").symlink_to(elsewhere)
    (folder / "step-0000000002").write_text("a file")
    (folder / "step-0000000003").symlink_to("/nowhere")
    (folder / ".step-0000000003.removed").symlink_to("/nowhere")
    write(tmp_path / "run", rank, 3, 4)
    assert names_in(folder) == [
        *("set-aside-step-0000000002", "set-aside-step-0000000003"),
        *("step-0000000003", "step-0000000004"),
    ]
    check_parts(read_manifest(elsewhere))


def test_a_checkpoint_stays_until_the_one_that_replaces_it_has_its_name(
    tmp_path, rank, monkeypatch
):
    """It may be the only one."""
    only = write(tmp_path, rank)
    rename = Path.rename

    def refuses_new_ones(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuses_new_ones)
    saver = Saver(tmp_path, keep=1, background=False, rank=rank)
    saver.save(STATE, run_state())
    saver.close()
    assert saver.failure is not None
    check_parts(read_manifest(only))
    monkeypatch.undo()
    write(tmp_path, rank, keep=1)
    assert list(only.parent.iterdir()) == [only]
