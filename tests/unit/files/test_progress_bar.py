"""Progress is a bar on a terminal, and a few lines in a log."""

import io
import sys

import pytest

from dlrm_sharded.files import progress_bar
from dlrm_sharded.files.progress_bar import ProgressBar


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
