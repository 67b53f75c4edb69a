"""Only whole checkpoints of a run count, and damaged ones are set aside."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_sharded.checkpoint.folder import checkpoints, set_aside
from dlrm_sharded.checkpoint.manifest import FILE_NAME, check_parts, read_manifest
from dlrm_sharded.checkpoint.saver import Saver
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.checkpoint.cases import STATE, run_state, write
from tests.unit.checkpoint.test_contents import PART, change


def write_steps(run_dir: Path, rank: Rank, *steps: int, keep: int = 2) -> None:
    """Let one process write checkpoints, as a run does."""
    saver = Saver(run_dir, keep=keep, background=False, rank=rank)
    for step in steps:
        saver.save(STATE, run_state(step))
    saver.close()
    assert saver.failure is None


def steps_in(run_dir: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints(run_dir)]


def truncate_part(path: Path) -> None:
    os.truncate(path / PART, 100)


def of_another_run(path: Path) -> None:
    change(path, lambda fields: fields.update(run="another"))


def of_a_later_format(path: Path) -> None:
    (path / FILE_NAME).write_text('{"format": 2, "checksum": "of another kind"}')


def without_manifest(path: Path) -> None:
    (path / FILE_NAME).unlink()


UNCOUNTED: dict[str, Callable[[Path], None]] = {
    "damaged": truncate_part,
    "another run": of_another_run,
    "later format": of_a_later_format,
}


@pytest.mark.parametrize("harm", UNCOUNTED)
def test_new_checkpoints_stay_below_higher_steps(harm: str, tmp_path: Path, rank: Rank) -> None:
    write_steps(tmp_path, rank, 90, 100)
    for path in checkpoints(tmp_path):
        UNCOUNTED[harm](path)
    write_steps(tmp_path, rank, 10, 20, 30)
    assert steps_in(tmp_path) == [100, 90, 30, 20]


@pytest.mark.parametrize("harm", UNCOUNTED)
def test_older_ones_that_do_not_count(harm: str, tmp_path: Path, rank: Rank) -> None:
    """A damaged checkpoint takes no good one's place and is removed with those before it."""
    write_steps(tmp_path, rank, 1, 2)
    UNCOUNTED[harm](checkpoints(tmp_path)[0])
    write_steps(tmp_path, rank, 3)
    assert steps_in(tmp_path) == [3, 2, 1]
    write_steps(tmp_path, rank, 4)
    assert steps_in(tmp_path) == ([4, 3] if harm == "damaged" else [4, 3, 2])


def test_an_old_one_of_which_nothing_is_known_is_set_aside(
    tmp_path: Path, rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    without_manifest(write(tmp_path, rank, step=1))
    with caplog.at_level(logging.WARNING):
        write_steps(tmp_path, rank, 2, 3, 4)
    assert steps_in(tmp_path) == [4, 3]
    assert "is set aside as set-aside-step-0000000001" in caplog.text


def test_a_damaged_one_of_the_same_step_is_set_aside(tmp_path: Path, rank: Rank) -> None:
    for _ in range(2):
        without_manifest(write(tmp_path, rank, step=7))
    write_steps(tmp_path, rank, 7)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "set-aside-step-0000000007",
        "set-aside-step-0000000007-2",
        "step-0000000007",
    ]
    check_parts(read_manifest(checkpoints(tmp_path)[0]))


def test_files_and_links_in_the_place_of_checkpoints(tmp_path: Path, rank: Rank) -> None:
    """They are neither in the way, nor is anything deleted that a link leads to."""
    elsewhere = write(tmp_path / "elsewhere", rank, step=1)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-0000000001").symlink_to(elsewhere)
    (folder / "step-0000000002").write_text("a file")
    (folder / "step-0000000003").symlink_to("/nowhere")
    (folder / ".step-0000000003.removed").symlink_to("/nowhere")
    write_steps(tmp_path / "run", rank, 3, 4)
    assert sorted(path.name for path in folder.iterdir()) == [
        "set-aside-step-0000000002",
        "set-aside-step-0000000003",
        "step-0000000003",
        "step-0000000004",
    ]
    check_parts(read_manifest(elsewhere))


def test_setting_aside_that_fails_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        set_aside(tmp_path / "step-0000000001")
    assert "cannot be set aside: No such file or directory" in caplog.text


def test_a_checkpoint_stays_until_the_one_that_replaces_it_has_its_name(
    tmp_path: Path, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
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
