"""The logs of schedulers whose replicas write to files, for `torchx log`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from torchx.schedulers.api import Scheduler, Stream, filter_regex, split_lines_iterator
from torchx.schedulers.local_scheduler import LogIterator


class LogFiles(Scheduler):
    """Reads the log of a replica at its `log_path`; TorchX would always wait for the end."""

    @abstractmethod
    def log_path(self, app_id: str, role: str, replica: int, stream: Stream | None) -> Path:
        """Return where a replica writes a stream; None is the one that `torchx log` shows."""

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Yield the lines a log has now, or also those to come."""
        path = self.log_path(app_id, role_name, k, streams)
        lines: Iterable[str]
        if should_tail:
            lines = split_lines_iterator(LogIterator(app_id, str(path), self))
        elif path.exists():
            lines = path.read_text(errors="replace").splitlines(keepends=True)
        else:
            return [f"no log yet, or none in {path}: started elsewhere, or with another log_dir?\n"]
        return filter_regex(regex, lines) if regex else lines
