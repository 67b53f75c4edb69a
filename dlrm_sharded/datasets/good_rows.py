"""The usable rows of a file; malformed ones are left out and logged by file and row."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from dlrm_sharded.datasets.columns import Fault, ParsedRows, parse
from dlrm_sharded.datasets.schema import Schema
from dlrm_sharded.datasets.source_files import Piece, read_pieces
from dlrm_sharded.files.errors import DataError

log = logging.getLogger(__name__)

MAX_EXAMPLES = 5
"""Largest number of malformed rows of a file that are logged one by one."""

MIN_ROWS = 100
"""Number of rows above which a file of mostly malformed rows is not read to its end."""


class RowTally:
    """Counts the rows of one file, and refuses it if too many are malformed.

    Args:
        max_malformed_share: allowed share of the file's rows; one malformed row is allowed in any
            file unless the share is 0.
    """

    def __init__(self, path: Path, max_malformed_share: float) -> None:
        self.path = path
        self.num_rows = self.num_malformed = 0
        self._max_share = max_malformed_share
        self._examples: list[str] = []

    def add(self, piece: Piece, faults: Sequence[Fault]) -> pl.Series:
        """Count the rows of a piece, and return [n] booleans: which rows are well-formed."""
        self.num_rows += len(piece.frame)
        wrong = np.zeros(len(piece.frame), np.bool_)
        for fault in faults:
            for row in np.flatnonzero(fault.rows & ~wrong)[:MAX_EXAMPLES]:
                [value] = piece.frame[fault.column].slice(row, 1).to_list()
                shown = repr(value)[:60] if value is not None else "missing"
                self._example(
                    piece.numbers[row], f"{fault.column} is {shown}; it must be {fault.must}"
                )
            wrong |= fault.rows
        self.num_malformed += int(wrong.sum())
        if self.num_rows > MIN_ROWS:
            self._check(max(0.5, self._max_share) * self.num_rows, "so far")
        return pl.Series(~wrong)

    def add_broken(self, number: int, reason: str) -> None:
        """Count a row of a text file that has too few or too many values."""
        self.num_rows += 1
        self.num_malformed += 1
        self._example(number, reason)

    def conclude(self, *, logs: bool) -> None:
        """Log how many rows of the file were left out, if any.

        Raises:
            DataError: they are too many.
        """
        self._check(math.ceil(self._max_share * self.num_rows), "in total")
        if self.num_malformed and logs:
            log.warning(
                "%s: %s of %s rows are malformed and left out:\n  %s",
                self.path,
                f"{self.num_malformed:,}",
                f"{self.num_rows:,}",
                "\n  ".join(self._examples),
            )

    def _example(self, number: int, reason: str) -> None:
        if len(self._examples) < MAX_EXAMPLES:
            self._examples.append(f"row {number + 1:,}: {reason}")

    def _check(self, most: float, when: str) -> None:
        if self.num_malformed > most:
            raise DataError(
                f"{self.path}: {self.num_malformed:,} of {self.num_rows:,} rows {when} are "
                f"malformed, more than the allowed share of {self._max_share:g}; correct the file "
                "or the schema, or raise max_malformed_share to leave such rows out. The first "
                "ones:\n  " + "\n  ".join(self._examples)
            )


def read_good_rows(
    schema: Schema,
    columns: Sequence[str],
    tally: RowTally,
    *,
    with_label: bool = True,
    stop: int | None = None,
    logs: bool = True,
) -> Iterator[tuple[ParsedRows, Piece]]:
    """Yield the well-formed rows of a tally's file, both parsed and as they were read.

    Args:
        stop: number of the first row that is not read; None reads to the end of the file.
        logs: whether malformed rows are logged.

    Raises:
        DataError: the file cannot be read or has too many malformed rows.
    """
    for piece in read_pieces(tally.path, schema, columns, tally.add_broken):
        if stop is not None:
            before = int((piece.numbers < stop).sum())
            piece = Piece(piece.frame.head(before), piece.numbers[:before])
        if not len(piece.frame):
            continue
        try:
            rows = parse(piece.frame, schema, with_label=with_label)
        except DataError as error:
            raise DataError(f"{tally.path}: {error}") from error
        good = tally.add(piece, rows.faults)
        if rows.faults:
            piece = Piece(piece.frame.filter(good), piece.numbers[good.to_numpy()])
            rows = parse(piece.frame, schema, with_label=with_label)
        if len(piece.frame):
            yield rows, piece
    if stop is None:  # a part of the rows may have more malformed ones
        tally.conclude(logs=logs)
