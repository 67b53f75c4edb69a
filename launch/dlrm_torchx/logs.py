"""The lines of a log file, for `torchx log`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchx.schedulers.api import Scheduler, filter_regex, split_lines_iterator
from torchx.schedulers.local_scheduler import LogIterator


def log_lines(
    path: Path, app_id: str, scheduler: Scheduler[Any], regex: str | None, should_tail: bool
) -> Iterable[str]:
    """Yield the lines a log has now, or also those to come; TorchX always waits for the end."""
    lines: Iterable[str]
    if should_tail:
        lines = split_lines_iterator(LogIterator(app_id, str(path), scheduler))
    elif path.exists():
        lines = path.read_text(errors="replace").splitlines(keepends=True)
    else:
        return [f"no log yet, or none in {path}: started elsewhere, or with another log_dir?\n"]
    return filter_regex(regex, lines) if regex else lines
