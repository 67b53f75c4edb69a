"""A log that cannot be written costs a line, and no run; progress is a bar on a terminal alone."""

import io
import logging
import sys

import pytest

from dlrm_sharded.files import progress_bar
from dlrm_sharded.files.log_file import LogFile
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
