"""Log lines, on the terminal and in the folder of a run."""

from __future__ import annotations

import errno
import logging
import shutil
import sys
import textwrap
from io import TextIOWrapper
from pathlib import Path

MAX_COLUMNS = 120


class LineFormatter(logging.Formatter):
    """Breaks messages between words; rows of Markdown tables and long words stay whole.

    Args:
        columns: width of a log file, in which errors are not broken, because comparisons of runs
            read them; None for the terminal's width, up to `MAX_COLUMNS`, or no limit without one.
    """

    def __init__(self, fmt: str, datefmt: str, columns: int | None = None) -> None:
        super().__init__(fmt, datefmt)
        self._columns = columns

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's own name
        """Return the formatted message, in lines that fit."""
        text = super().formatMessage(record)
        width = self._columns or _terminal_columns()
        if width is None or (self._columns and record.levelno >= logging.ERROR):
            return text
        return "\n".join(_broken(line, width) for line in text.split("\n"))


def _terminal_columns() -> int | None:
    """Return the width of messages on a terminal; None without one: programs read whole lines."""
    if not sys.stderr.isatty():
        return None
    return min(shutil.get_terminal_size((MAX_COLUMNS, 24)).columns, MAX_COLUMNS)


def _broken(line: str, width: int) -> str:
    if len(line) <= width or line.startswith("|"):
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


class LogFile(logging.FileHandler):
    """A log file that stops after the first line that it cannot write, as on a full disk."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; the first one opens the file, which may belong to another user."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def _open(self) -> TextIOWrapper:
        if Path(self.baseFilename).is_fifo():
            raise OSError(errno.EINVAL, "it is a pipe, which may have no reader", self.baseFilename)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's own name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.setLevel(logging.CRITICAL + 1)
        print(f"the log ends here: {self.baseFilename}: {error.strerror}", file=sys.stderr)
