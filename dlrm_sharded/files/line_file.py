"""A file to which runs append lines of JSON, and from which later runs read what can be used.

No line can stop a reader: lines that cannot be used are named and skipped.
They stay in the file.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from dlrm_sharded.files.errors import DataError, shortened
from dlrm_sharded.files.json_files import replace_file

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FILE_BYTES = 32 * 2**20
"""Size beyond which a file loses the earlier half of its lines."""

LOCK_S = 10.0
"""Time to wait for another run that writes."""

MAX_NAMED = 5
"""Number of lines that a message names."""

DAMAGED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors of reading JSON that anyone may have written."""


@dataclass(frozen=True, slots=True)
class LineFile:
    """The file; it need not exist.

    Args:
        noun: what a line is, such as "run".
        format: version of the lines; readers pass over later ones.
    """

    path: Path
    noun: str
    format: int

    def append(self, fields: Mapping[str, Any]) -> bool:
        """Write a line at the end and return True; if that is impossible, warn and return False."""
        line = json.dumps({"format": self.format, **fields}, allow_nan=False)
        try:
            self._check_kind()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=LOCK_S):
                if self.path.exists() and self.path.stat().st_size > MAX_FILE_BYTES:
                    lines = self.path.read_bytes().splitlines(keepends=True)
                    replace_file(self.path, b"".join(lines[len(lines) // 2 :]))
                with self.path.open("ab") as file:
                    file.write(_after_whole_line(self.path) + line.encode() + b"\n")
        except (OSError, Timeout) as error:
            self.refuse(str(error))
            return False
        return True

    def refuse(self, reason: str) -> None:
        """Warn that something is not written, and why."""
        log.warning("the %s is not noted in the journal %s: %s", self.noun, self.path, reason)

    def read(self, parse: Callable[[Mapping[str, Any]], T | None], *, most: int) -> dict[int, T]:
        """Return the latest lines by their numbers, the last one last.

        Args:
            parse: reads the fields of a line; returns None to leave it out without a word, and
                raises DataError with the reason if it cannot be used.
            most: number of lines to return.
        """
        try:
            self._check_kind()
            lines = self.path.read_bytes().splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            log.warning("the journal of %ss %s cannot be read: %s", self.noun, self.path, error)
            return {}
        found: dict[int, T] = {}
        unusable: list[str] = []
        later: list[str] = []
        for number in range(len(lines), 0, -1):
            try:
                fields = json.loads(lines[number - 1])
                if self._is_later(fields["format"]):
                    later.append(f"line {number}")
                    continue
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
        where = f"of {len(lines)} lines of the journal of {self.noun}s {self.path}"
        if unusable:
            log.warning(
                "%d %s cannot be used and %s passed over: %s",
                len(unusable),
                where,
                "is" if len(unusable) == 1 else "are",
                named(unusable[::-1]),
            )
        if later:
            log.warning(
                "%d %s %s of a later version of dlrm_sharded, which this one passes over: %s",
                len(later),
                where,
                "is" if len(later) == 1 else "are",
                named(later[::-1]),
            )
        return dict(reversed(found.items()))

    def _check_kind(self) -> None:
        """Raise OSError for what is there and no file: a pipe would be waited at for ever."""
        if self.path.exists() and not self.path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file", str(self.path))

    def _is_later(self, version: object) -> bool:
        """Return whether the format of a line is a later one.

        Raises:
            DataError: it is no format at all.
        """
        if type(version) is not int or version < 1:
            raise DataError(f"its format is {shortened(version)}")
        return version > self.format


def named(lines: list[str]) -> str:
    """Return the texts of lines as a list that names the latest ones."""
    more = len(lines) - MAX_NAMED
    return ", ".join(([f"{more} more"] if more > 0 else []) + lines[-MAX_NAMED:])


def _after_whole_line(path: Path) -> bytes:
    """Return the end of a line that a kill has cut off, which would damage the next one too."""
    if not path.exists() or path.stat().st_size == 0:
        return b""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return b"" if file.read() == b"\n" else b"\n"
