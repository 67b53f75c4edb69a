"""Files of JSON lines, to which measurements are appended, and from which they are read back.

No content of a line stops a reader: unusable lines are skipped with one warning that names them,
and stay in the file. A line that a kill cut off does not damage others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from dlrm_sharded.files.errors import ConfigError, DataError, shortened
from dlrm_sharded.files.json_files import read_file, replace_file

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FILE_BYTES = 32 * 2**20
"""Size above which a file loses the earlier half of its lines."""

LOCK_S = 10.0
"""Time to wait while another run writes."""

STAGED = "journal.jsonl"
"""File in the folder of a sweep's run that stages journal lines until the sweep ends."""

MAX_NAMED = 5
"""Largest number of lines that a message names."""

DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of reading untrusted JSON."""


@dataclass(frozen=True, slots=True)
class LineFile:
    """A file of JSON lines, which need not exist.

    Args:
        noun: what a line describes, such as "run".
        format: version that is written to each line; readers skip later ones. None for lines
            without a version.
        staged: file that stages lines until `deliver` appends them here; None to append at once.
    """

    path: Path
    noun: str
    format: int | None = None
    staged: Path | None = None

    def append(self, fields: Mapping[str, Any]) -> None:
        """Write a line at the end; it is on disk when this returns.

        Raises:
            OSError: the file cannot be written.
        """
        version = {} if self.format is None else {"format": self.format}
        line = json.dumps({**version, **fields}, allow_nan=False).encode()
        with self.path.open("ab") as file:
            file.write(_after_whole_line(self.path) + line + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def note(self, fields: Mapping[str, Any]) -> bool:
        """Append a line to a file that many runs share, or to the staged file, and return True.

        If that is impossible, warn and return False.
        """
        if self.staged is not None:
            target = {"file": self.path.name, "noun": self.noun, "format": self.format}
            return LineFile(self.staged, self.noun).note({"to": target, "fields": fields})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=LOCK_S):
                if self.path.exists() and self.path.stat().st_size > MAX_FILE_BYTES:
                    lines = read_file(self.path).splitlines(keepends=True)
                    replace_file(self.path, b"".join(lines[len(lines) // 2 :]))
                self.append(fields)
        except (OSError, Timeout, ValueError) as error:
            self.refuse(str(error))
            return False
        return True

    def refuse(self, reason: str) -> None:
        """Warn that a line is not written, and why."""
        log.warning("the %s could not be added to the journal %s: %s", self.noun, self.path, reason)

    def latest(
        self, parse: Callable[[Mapping[str, Any]], T | None], *, most: int | None = None
    ) -> dict[int, T]:
        """Return the latest usable lines by line number, in the order of the file.

        If the file cannot be read, warn and return no lines.

        Args:
            parse: converts the fields of a line; returns None to leave the line out silently, and
                raises DataError with the reason if the line is unusable.
            most: largest number of lines to return; None for all.
        """
        try:
            lines = read_file(self.path).splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            log.warning("the journal of %ss %s cannot be read: %s", self.noun, self.path, error)
            return {}
        found: dict[int, T] = {}
        unusable: list[str] = []
        for number in range(len(lines), 0, -1):
            try:
                fields = json.loads(lines[number - 1])
                if self.format is not None and fields["format"] > self.format:
                    raise DataError("it is of a later version of dlrm_sharded")
                parsed = parse(fields)
            except DataError as error:
                unusable.append(f"line {number} ({error})")
            except DAMAGED:
                unusable.append(f"line {number} (damaged)")
            else:
                if parsed is not None:
                    found[number] = parsed
            if len(found) == most:
                break
        if unusable:
            log.warning(
                "%d of %d lines of the journal of %ss %s cannot be used and %s skipped: %s",
                len(unusable),
                len(lines),
                self.noun,
                self.path,
                "is" if len(unusable) == 1 else "are",
                named(unusable[::-1]),
            )
        return dict(reversed(found.items()))


def locked(path: Path, *, refusal: str) -> FileLock:
    """Return a lock that this process holds until it releases it or ends.

    Raises:
        ConfigError: another process has the lock (the message is `refusal`), or its file cannot be
            made.
    """
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise ConfigError(refusal) from error
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {error.strerror}") from error
    return lock


@contextlib.contextmanager
def turn(path: Path, *, doing: str, limit_s: float) -> Iterator[bool]:
    """Wait for a lock for a limited time, and yield whether this process has it.

    Args:
        doing: what a process does while it has the lock, as messages say it.

    Raises:
        OSError: the lock's file cannot be made.
    """
    lock = FileLock(path)
    with contextlib.suppress(Timeout):
        lock.acquire(blocking=False)
    if not lock.is_locked:
        log.info("waiting at most %.0f s for %s, which %s", limit_s, holder(path), doing)
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=limit_s)
    if not lock.is_locked:
        log.warning("%s still %s; this process continues without it", holder(path), doing)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def holder(path: Path) -> str:
    """Return a text that says which process has a lock, if Linux tells."""
    with contextlib.suppress(OSError, ValueError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, place, *_ = line.split()
            if kind == "FLOCK" and place.rpartition(":")[2] == inode and pid != "0":
                return f"process {pid}"
    return "another process"


def deliver(staged: Path, folder: Path) -> None:
    """Append staged lines to their files, once; the staged file stays, with the suffix .delivered.

    Args:
        folder: folder of the target files.
    """

    def parsed(fields: Mapping[str, Any]) -> tuple[LineFile, Mapping[str, Any]]:
        to = fields["to"]
        path = folder / Path(to["file"]).name
        return LineFile(path, to["noun"], to["format"]), dict(fields["fields"])

    lines = LineFile(staged, "note").latest(parsed)
    if lines:
        staged.replace(staged.with_suffix(".delivered"))
    for file, fields in lines.values():
        file.note(fields)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a text with the differences between two settings; empty if there are none."""
    now = json.loads(json.dumps(now))
    return "; ".join(
        f"{key}: {shortened(before.get(key))}, now {shortened(now.get(key))}"
        for key in dict.fromkeys([*now, *before])
        if before.get(key) != now.get(key)
    )


def named(lines: list[str]) -> str:
    """Join the texts of the latest lines, and the number of the others."""
    more = len(lines) - MAX_NAMED
    return ", ".join(([f"{more} more"] if more > 0 else []) + lines[-MAX_NAMED:])


def _after_whole_line(path: Path) -> bytes:
    """Return a line end if a kill cut off the file's last line, which would damage the next one."""
    if not path.exists() or path.stat().st_size == 0:
        return b""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return b"" if file.read() == b"\n" else b"\n"
