"""A log that cannot be written costs a line, and no run; progress is a bar on a terminal alone."""

import io
import logging
import os
import sys
from types import SimpleNamespace

import pytest

from dlrm_sharded.files import progress_bar
from dlrm_sharded.files.log_file import LineFormatter, LogFile
from dlrm_sharded.files.progress_bar import ProgressBar


def test_a_file_that_cannot_be_opened_is_said_once(tmp_path, capsys):
    """It is opened for its first line: by then it may be another user's, or its folder gone."""
    handler = LogFile(tmp_path / "gone" / "train.log", delay=True)
    logger = logging.Logger("of a run")
    logger.addHandler(handler)
    for number in range(3):
        logger.warning("line %d", number)
    path = tmp_path / "gone" / "train.log"
    assert capsys.readouterr().err == f"the log ends here: {path}: No such file or directory\n"


LONG = "the run will take 1.931 GiB of 14.445 GiB that are available " * 4
MESSAGES = {
    "short": ("done", 120, "[now] done"),
    "long": (LONG, 120, None),
    "narrow": (LONG, 60, None),
    "indented": (f"summary:\n  {LONG}", 80, None),
    "table": (f"rows:\n| {LONG} |", 80, f"[now] rows:\n| {LONG} |"),
    "path": (f"in /{'x' * 130}", 120, f"[now] in\n  /{'x' * 130}"),
}


@pytest.mark.parametrize(("message", "columns", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_breaks_long_messages_between_words(message, columns, expected):
    record = logging.LogRecord("x", logging.INFO, "", 0, message, None, None)
    written = LineFormatter("[%(asctime)s] %(message)s", "now", columns).format(record)
    assert written.split() == ["[now]", *message.split()]
    if expected is not None:
        assert written == expected
    else:
        assert max(map(len, written.split("\n"))) <= columns


@pytest.mark.parametrize(("columns", "most"), [("80", 80), ("200", 120), (None, len(LONG))])
def test_terminals_show_up_to_120_columns(monkeypatch, columns, most):
    """Programs that read the messages get them whole."""
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: columns is not None))
    monkeypatch.setenv("COLUMNS", columns or "80")
    record = logging.LogRecord("x", logging.ERROR, "", 0, LONG, None, None)
    written = LineFormatter("%(message)s", "now").format(record)
    assert most - 20 < max(map(len, written.split("\n"))) <= most


def test_errors_in_a_file_stay_whole():
    record = logging.LogRecord("x", logging.ERROR, "", 0, LONG, None, None)
    assert LineFormatter("%(message)s", "now", 120).format(record) == LONG


def test_a_pipe_in_the_place_of_a_log_is_not_waited_at(tmp_path, ends_in_time, capsys):
    os.mkfifo(tmp_path / "train.log")
    log = LogFile(tmp_path / "train.log", delay=True)
    log.emit(logging.LogRecord("x", logging.INFO, "", 0, "a line", None, None))
    assert "the log ends here: " in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("every_s", "num_lines"), [(60.0, 1), (0.0, 1000)], ids=["short", "long"])
def test_writes_lines_without_a_terminal(monkeypatch, every_s, num_lines):
    """A task that ends at once has its last line alone."""
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(progress_bar, "LINE_EVERY_S", every_s)
    with ProgressBar(total=1000, unit="step") as bar:
        for _ in range(1000):
            bar.update()
    lines = log.getvalue().splitlines()
    assert "\r" not in log.getvalue()
    assert "1000/1000" in lines[-1]
    assert len(lines) <= num_lines + 1
    assert max(map(len, lines)) <= 120


def test_is_a_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressBar(total=3, unit="step") as bar:
        bar.update(3)
    assert terminal.getvalue().startswith("\r")
    assert "3/3" in terminal.getvalue()
