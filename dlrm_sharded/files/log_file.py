"""The log file of a run."""

from __future__ import annotations

import logging
import sys


class LogFile(logging.FileHandler):
    """A log file that stops after the first line that it cannot write, as on a full disk."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; the first one opens the file, which may belong to another user."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, logging's own name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.setLevel(logging.CRITICAL + 1)
        print(f"the log ends here: {self.baseFilename}: {error.strerror}", file=sys.stderr)
