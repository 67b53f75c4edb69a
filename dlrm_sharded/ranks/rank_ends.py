"""Reads for a launcher what the ranks of its host have written of their ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from dlrm_sharded.files.errors import EXIT_USER_ERROR, PreemptedError


class RememberedLogs(LogsSpecs):
    """Where ranks write, as torchrun decides it; knows the error files of the last start."""

    def __init__(self, logs: LogsSpecs) -> None:
        self._logs = logs
        self._error_files: Mapping[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = self._logs.reify(envs)
        self._error_files = destination.error_files
        return destination

    @property
    def root_log_dir(self) -> str:
        return self._logs.root_log_dir

    def has_said(self, line: str | None = None) -> bool:
        """Return whether a rank of this host has shown this line; None for any line."""
        return any(end.get("is_said") and line in (None, end["line"]) for end in self._ends())

    def line(self) -> str | None:
        """Return the line of the ranks' error, an error of the user before any other."""
        ends = sorted(self._ends(), key=lambda end: end.get("exit_code") != EXIT_USER_ERROR)
        return next((str(end["line"]) for end in ends if "line" in end), None)

    def mistake(self, exit_code: int | None) -> str | None:
        """Return the line of an error of the user, which may be empty; None if there is none.

        Args:
            exit_code: that of a rank. Whoever ends with 2 before it can write an error file cannot
                read its command line.
        """
        codes = {exit_code, *(end.get("exit_code") for end in self._ends())}
        return (self.line() or "") if EXIT_USER_ERROR in codes else None

    def were_preempted(self) -> bool:
        """Return whether ranks of the last start ended after a signal and a checkpoint."""
        return any(end.get("error_class") == PreemptedError.__name__ for end in self._ends())

    def _ends(self) -> list[Mapping[str, Any]]:
        """Return what ranks of the last start wrote of their ends."""
        ends = []
        for path in self._error_files.values():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                ends.append(json.loads(Path(path).read_text())["message"]["extraInfo"])
        return ends
