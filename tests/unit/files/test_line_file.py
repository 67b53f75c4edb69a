"""A damaged line costs no other one, and what cannot be written costs a warning."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.files import line_file
from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.line_file import LineFile, deliver, locked, turn
from tests.processes import lock_of_another_process


@pytest.fixture
def file(tmp_path: Path) -> LineFile:
    return LineFile(tmp_path / "deep" / "runs.jsonl", "run", 1)


def number(fields: Mapping[str, Any]) -> int | None:
    """Read a line; numbers above 100 are impossible, and those below 0 are left out."""
    if fields["number"] > 100:
        raise DataError("its number is too large")
    return int(fields["number"]) if fields["number"] >= 0 else None


DAMAGE = {
    "no_json": b"{",
    "a_number": b"7",
    "a_list": b"[]",
    "empty": b"",
    "zeros": bytes(200),
    "binary": b"\xff\x00\xfe",
    "no_format": b'{"number": 5}',
    "format_is_no_number": b'{"format": "1", "number": 5}',
    "later_format": b'{"format": 9, "number": 5}',
    "no_fields": b'{"format": 1}',
    "text": b'{"format": 1, "number": "5"}',
    "impossible": b'{"format": 1, "number": 101}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("line", DAMAGE.values(), ids=DAMAGE)
def test_damaged_lines_are_skipped(file, caplog, line):
    assert file.latest(number) == {}
    assert file.note({"number": 3})
    with file.path.open("ab") as appended:
        appended.write(line + b"\n")
    assert file.note({"number": -1})
    assert file.note({"number": 4})
    before = file.path.read_bytes()
    assert file.latest(number) == {1: 3, 4: 4}
    assert file.latest(number, most=1) == {4: 4}
    [said] = caplog.messages
    assert f"1 of 4 lines of the journal of runs {file.path} cannot be used and is skipped" in said
    assert "line 2 (" in said
    assert file.path.read_bytes() == before, "nothing is deleted"


def test_a_line_that_was_cut_off_does_not_damage_the_next(file):
    file.note({"number": 1})
    whole = file.path.read_bytes()
    file.path.write_bytes(whole + whole[: len(whole) // 2])
    file.note({"number": 2})
    assert file.latest(number) == {1: 1, 3: 2}


def test_a_long_file_loses_its_earlier_half(file, monkeypatch):
    for i in range(4):
        file.note({"number": i})
    monkeypatch.setattr(line_file, "MAX_FILE_BYTES", 50)
    file.note({"number": 4})
    assert list(file.latest(number).values()) == [2, 3, 4]


def test_a_folder_that_cannot_be_written_costs_a_warning(file, caplog):
    file.path.parent.write_text("a file is in the way")
    assert not file.note({"number": 1})
    assert file.latest(number) == {}
    [said] = caplog.messages
    assert "the run could not be added to the journal" in said


def test_a_lock_is_refused_with_the_reason(tmp_path):
    lock = locked(tmp_path / "lock", refusal="somebody else works here")
    with pytest.raises(ConfigError, match="somebody else works here"):
        locked(tmp_path / "lock", refusal="somebody else works here")
    lock.release()
    with pytest.raises(ConfigError, match="cannot lock"):
        locked(tmp_path, refusal="never said")


def test_staged_lines_are_delivered_once(file, tmp_path):
    """Until then, whoever reads the file does not see what others of the sweep have measured."""
    staged = tmp_path / "run" / "journal.jsonl"
    notes = dataclasses.replace(file, staged=staged)
    file.note({"number": 1})
    assert notes.note({"number": 2})
    assert notes.note({"number": 3})
    assert list(notes.latest(number).values()) == [1]
    for _ in range(2):
        deliver(staged, file.path.parent)
        assert list(file.latest(number).values()) == [1, 2, 3]
    deliver(tmp_path / "nothing", file.path.parent)


def test_staged_lines_are_delivered_to_one_folder_alone(file, tmp_path, caplog):
    """Whoever may write to a sweep's folder must not be able to change other files by that."""
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    staged = tmp_path / "journal.jsonl"
    for path in (str(mine), "../mine.txt", file.path.name):
        to = {"file": path, "noun": "run", "format": 1}
        LineFile(staged, "note").append({"to": to, "fields": {"number": 3}})
    with staged.open("a") as notes:  # which has no value in JSON, and would end the sweep's driver
        notes.write(json.dumps({"to": to, "fields": {"number": float("nan")}}) + "\n")
    deliver(staged, file.path.parent)
    assert mine.read_text() == "mine"
    assert list(file.latest(number).values()) == [3]


def test_a_turn_is_waited_for_with_a_message_and_a_limit(tmp_path, caplog):
    lock, doing = tmp_path / "lock", "measures this machine"
    with (
        caplog.at_level("INFO"),
        lock_of_another_process(lock) as pid,
        turn(lock, doing=doing, limit_s=0.2) as has_turn,
    ):
        assert not has_turn
    waiting, without = caplog.messages
    assert waiting == f"waiting at most 0 s for process {pid}, which measures this machine"
    assert without.startswith(f"process {pid} still measures this machine; this process continues")
    with turn(lock, doing=doing, limit_s=60) as has_turn:
        assert has_turn
    assert len(caplog.messages) == 2
