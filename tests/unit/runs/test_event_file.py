"""An event file goes on where a checkpoint was taken, and a full disk does not end a run."""

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_sharded.files.errors import LostFolderError
from dlrm_sharded.runs.run_events import EventFile


def scalars(folder: Path) -> list[tuple[int, float]]:
    (path,) = folder.glob("events.out.tfevents.*")
    events = EventAccumulator(str(path))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def test_goes_on_at_a_position(tmp_path):
    """What was written after the position is dropped, even half an event."""
    first = EventFile(tmp_path)
    first.scalar("loss", 3.0, 1)
    position = first.position()
    first.scalar("loss", 9.0, 2)
    first.position()
    with (tmp_path / position[0]).open("ab") as file:
        file.write(b"half an ev")
    second = EventFile(tmp_path, going_on=position)
    second.scalar("loss", 2.0, 2)
    second.position()
    assert scalars(tmp_path) == [(1, 3.0), (2, 2.0)]


@pytest.mark.parametrize("position", [("events.out.tfevents.1", 10), ("events.out.tfevents.2", 1)])
def test_a_lost_file_begins_anew(tmp_path, position):
    """It is not there, or is shorter than it was."""
    (tmp_path / "events.out.tfevents.1").write_bytes(b"short")
    file = EventFile(tmp_path / "new", going_on=position)
    file.scalar("loss", 1.0, 5)
    file.position()
    assert scalars(tmp_path / "new") == [(5, 1.0)]


def test_full_disk_is_one_warning(tmp_path, monkeypatch, caplog):
    file = EventFile(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "open", Mock(side_effect=full))
    for step in range(3):
        file.scalar("loss", 1.0, step)
    file.position()
    (warning,) = caplog.messages
    assert "No space left on device" in warning


def test_nothing_is_written_over_the_events_of_another_job(tmp_path, caplog):
    """It went on with the file while this one was stopped, which then writes nothing more."""
    owners = ["this job"]

    def check_owner() -> None:
        if owners != ["this job"]:
            raise LostFolderError("another job has taken over")

    first = EventFile(tmp_path, check_owner=check_owner)
    first.scalar("loss", 3.0, 1)
    position = first.position()
    first.scalar("loss", 9.0, 2)
    owners.append("another job")
    second = EventFile(tmp_path, going_on=position)
    second.scalar("loss", 2.0, 2)
    second.position()
    first.position()
    assert scalars(tmp_path) == [(1, 3.0), (2, 2.0)]
    [warning] = caplog.messages
    assert warning.endswith("another job has taken over")


def test_two_jobs_append(tmp_path):
    """If the one learns of the other too late, it costs no event of either."""
    first = EventFile(tmp_path)
    first.scalar("loss", 3.0, 1)
    second = EventFile(tmp_path, going_on=first.position())
    first.scalar("loss", 4.0, 2)
    second.scalar("loss", 2.0, 2)
    second.position()
    first.position()
    assert scalars(tmp_path) == [(1, 3.0), (2, 2.0), (2, 4.0)]
