"""Reads a Criteo TSV, plain or gzip, as a stream of parsed samples, and finds malformed lines.

There is no header. A line has 40 columns: label, 13 integers, 26 categoricals; a missing value is
an empty column. A line is malformed unless its label is 0 or 1, its integers have 32 bits and its
categoricals are hexadecimal numbers of 32 bits. Malformed lines are left out and reported with file
and line number.
"""

from __future__ import annotations

import gzip
import io
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

from dlrm_sharded.files.errors import DataError

log = logging.getLogger(__name__)

NUM_COLUMNS = 1 + len(DEFAULT_INT_NAMES) + len(DEFAULT_CAT_NAMES)
CHUNK_BYTES = 4 << 20
"""Bytes that are read at once; they stay in the processor's cache while they are parsed."""

MAX_LINE_BYTES = 16 << 20
MAX_EXAMPLES = 5
"""Number of malformed lines per file that are reported one by one."""

_GZIP_MAGIC = b"\x1f\x8b"
_SCHEMA = {
    DEFAULT_LABEL_NAME: pl.Int32,
    **dict.fromkeys(DEFAULT_INT_NAMES, pl.Int32),
    **dict.fromkeys(DEFAULT_CAT_NAMES, pl.String),
}
_RAW_IDS = (
    pl.col(DEFAULT_CAT_NAMES).str.to_integer(base=16, strict=False).cast(pl.UInt32, strict=False)
)
_COMMON_LINE = re.compile(rb"[01](\t(-?\d{1,9})?){13}(\t[0-9a-fA-F]{0,8}){26}")
_INTEGER = re.compile(rb"[+-]?\d+")
_HEX = re.compile(rb"[+-]?[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class ParsedSamples:
    """n samples. Missing and negative integers x count as 0; a missing id is 0.

    Args:
        labels: [n] of 0 and 1.
        dense: [n, 13], log(1 + x).
        ids: [26, n], raw ids.
    """

    labels: npt.NDArray[np.uint8]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.uint32]


class CriteoTsv:
    """One file, to be iterated over once; the counts are final when the iteration has ended.

    Args:
        max_malformed_share: more malformed lines than this share of all lines is an error; one
            malformed line is allowed in any file unless the share is 0.
        on_read: called with the bytes of the file (as stored) read since the last call.

    Raises:
        DataError: while iterating, if the file is unreadable, truncated, empty or too malformed.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_malformed_share: float,
        on_read: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        self.path = path
        self.num_samples = 0
        self.num_malformed = 0
        self._max_malformed_share = max_malformed_share
        self._on_read = on_read
        self._examples: list[str] = []
        self._next_line = 1

    def __iter__(self) -> Iterator[ParsedSamples]:
        for text in self._texts():
            samples = self._samples(text)
            self._next_line += text.count(b"\n")
            self.num_samples += len(samples.labels)
            if self.num_malformed > max(0.5, self._max_malformed_share) * self._num_lines:
                raise self._too_malformed("so far")
            if len(samples.labels):
                yield samples
        if self.num_malformed:
            log.warning("%s: %s of %s lines are malformed and left out", *self._tally())
        if self.num_malformed > math.ceil(self._max_malformed_share * self._num_lines):
            raise self._too_malformed("in total")
        if not self.num_samples:
            raise DataError(f"{self.path} has no samples; give a Criteo TSV or leave it out")

    @property
    def _num_lines(self) -> int:
        return self.num_samples + self.num_malformed

    def _texts(self) -> Iterator[bytes]:
        """Yield the file in pieces of whole lines, with line feeds instead of carriage returns."""
        try:
            with self.path.open("rb") as file:
                for text in self._whole_lines(file):
                    yield text.replace(b"\r\n", b"\n")
        except FileNotFoundError:
            raise DataError(f"{self.path.absolute()} does not exist; correct the path") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self.path} is a truncated or damaged gzip file ({error}), after line "
                f"{self._next_line - 1:,}; fetch it again"
            ) from error

    def _whole_lines(self, file: io.BufferedReader) -> Iterator[bytes]:
        is_gzip = file.peek(2)[:2] == _GZIP_MAGIC
        stream: Any = gzip.GzipFile(fileobj=file) if is_gzip else file
        rest, position = b"", 0
        while data := stream.read(CHUNK_BYTES):
            self._on_read(file.tell() - position)
            position = file.tell()
            end = data.rfind(b"\n") + 1
            if end:
                yield rest + data[:end]
                rest = data[end:]
            else:
                rest += data
                if len(rest) > MAX_LINE_BYTES:
                    raise DataError(
                        f"{self.path}:{self._next_line} is longer than {MAX_LINE_BYTES:,} B; "
                        "this is not a Criteo TSV"
                    )
        if rest:
            yield rest + b"\n"

    def _samples(self, text: bytes) -> ParsedSamples:
        table = _parsed(text)
        if table is None:
            table = _parsed(self._without_malformed(text))
            assert table is not None, "the two definitions of a malformed line differ"
        integers = table.select(pl.col(DEFAULT_INT_NAMES).fill_null(0).clip(lower_bound=0))
        return ParsedSamples(
            labels=table[DEFAULT_LABEL_NAME].to_numpy().astype(np.uint8),
            dense=np.log1p(integers.to_numpy().astype(np.float32)),
            ids=table.select(pl.col(DEFAULT_CAT_NAMES).fill_null(0)).to_numpy().T,
        )

    def _without_malformed(self, text: bytes) -> bytes:
        good = []
        for number, line in enumerate(text.split(b"\n"), self._next_line):
            fault = None if _COMMON_LINE.fullmatch(line) else _fault(line)
            if fault is not None:
                self._note(f"{self.path}:{number}: {fault}")
            elif line:
                good.append(line + b"\n")
        return b"".join(good)

    def _note(self, example: str) -> None:
        self.num_malformed += 1
        if len(self._examples) < MAX_EXAMPLES:
            self._examples.append(example)
            log.warning("malformed line left out: %s", example)

    def _tally(self) -> tuple[Path, str, str]:
        return self.path, f"{self.num_malformed:,}", f"{self._num_lines:,}"

    def _too_malformed(self, when: str) -> DataError:
        path, num_malformed, num_lines = self._tally()
        return DataError(
            f"{path}: {num_malformed} of {num_lines} lines {when} are malformed, more than the "
            f"allowed share of {self._max_malformed_share:g}; correct the file, or raise "
            "max_malformed_share to leave such lines out. The first ones:\n  "
            + "\n  ".join(self._examples)
        )


def _parsed(text: bytes) -> pl.DataFrame | None:
    """Return label, integers and ids as numbers, null where missing; None if a line is malformed.

    polars pads short lines, cuts long lines and skips blank ones without an error, and ignores
    spaces and carriage returns around integers. So all this is checked before.
    """
    if not text.isascii() or b" " in text or b"\r" in text or not _is_rectangular(text):
        return None
    try:
        table = pl.read_csv(text, has_header=False, separator="\t", quote_char=None, schema=_SCHEMA)
    except pl.exceptions.ComputeError:  # not an integer
        return None
    labels = table[DEFAULT_LABEL_NAME]
    ids = table.select(_RAW_IDS)
    num_missing = table.select(DEFAULT_CAT_NAMES).null_count()
    if labels.null_count() or not labels.is_between(0, 1).all():
        return None
    if ids.null_count().row(0) != num_missing.row(0):
        return None
    return table.with_columns(ids)


def _is_rectangular(text: bytes) -> bool:
    """Return whether each line has 40 columns."""
    characters = np.frombuffer(text, np.uint8)
    line_ends = np.flatnonzero(characters == ord("\n"))
    tabs = np.flatnonzero(characters == ord("\t"))
    if len(tabs) != (NUM_COLUMNS - 1) * len(line_ends):
        return False
    by_line = tabs.reshape(-1, NUM_COLUMNS - 1)
    return bool((by_line[:, -1] < line_ends).all() and (by_line[1:, 0] > line_ends[:-1]).all())


def _fault(line: bytes) -> str | None:
    """Return what is wrong with a line; None if it is well-formed or blank."""
    if not line:
        return None
    columns = line.split(b"\t")
    if len(columns) != NUM_COLUMNS:
        hint = ""
        if len(columns) == NUM_COLUMNS - 1:
            hint = "; a test file without labels cannot be used"
        return (
            f"{len(columns)} columns, must be {NUM_COLUMNS} (label, {len(DEFAULT_INT_NAMES)} "
            f"integers, {len(DEFAULT_CAT_NAMES)} categoricals){hint}"
        )
    label, integers, ids = columns[0], columns[1:-26], columns[-26:]
    if not _INTEGER.fullmatch(label) or int(label) not in (0, 1):
        return f"the label is {_shown(label)}, must be 0 or 1"
    for name, column in zip(DEFAULT_INT_NAMES, integers, strict=True):
        if column and not (_INTEGER.fullmatch(column) and -(2**31) <= int(column) < 2**31):
            return f"{name} is {_shown(column)}, must be empty or an integer of 32 bits"
    for name, column in zip(DEFAULT_CAT_NAMES, ids, strict=True):
        if column and not (_HEX.fullmatch(column) and 0 <= int(column, 16) < 2**32):
            return f"{name} is {_shown(column)}, must be empty or 8 hexadecimal digits"
    return None


def _shown(column: bytes) -> str:
    return repr(column if len(column) <= 20 else column[:20] + b"...")[1:]
