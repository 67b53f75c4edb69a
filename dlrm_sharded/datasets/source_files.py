"""Reads users' Parquet and text files of columns in pieces, with bounded memory.

Text files are read by pyarrow, which reports rows with too few or too many values; polars pads such
rows silently. Parquet files are read by polars, which is twice as fast at it.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
from pyarrow import csv

from dlrm_sharded.datasets.schema import Schema
from dlrm_sharded.files.errors import ConfigError, DataError, check_path

PIECE_ROWS = 1 << 16
"""Number of rows of a Parquet file that are read at once."""

PIECE_BYTES = 8 << 20
"""Bytes of a text file that are read at once, and so the limit of a row's length."""

COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
PARQUET = (".parquet", ".pq")
TEXTS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
"""Suffixes of text files, with the separators of their columns."""


@dataclass(frozen=True, slots=True)
class TextForm:
    """The format of text files, if there is no schema to say it; see `Schema`."""

    separator: str | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a file.

    Args:
        frame: the columns that were asked for; in a text file they are strings, and an empty
            string is a missing value.
        numbers: [len(frame)], the number of each row in its file, from 0, without the header.
    """

    frame: pl.DataFrame
    numbers: npt.NDArray[np.int64]


def find_files(key: str, patterns: object) -> list[Path]:
    """Return the files that paths, folders and globs name; those of each are in natural order.

    Raises:
        ConfigError: a value is not a path.
        DataError: a path matches no file, or a file is named twice.
    """
    given = [patterns] if isinstance(patterns, str | Path) else patterns
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(f"{key} is {patterns!r}; name files, folders or globs")
    found: list[Path] = []
    for pattern in given:
        check_path(key, pattern)
        path = Path(pattern)  # a file's name may have brackets
        matches = [path] if path.exists() else map(Path, glob.glob(str(path)))  # noqa: PTH207
        files = [file for match in matches for file in _files_of(match)]
        if no_files := [file for file in files or [path] if not file.is_file()]:
            raise DataError(
                f"{key}: {no_files[0].absolute()} is no file, and no folder or glob with files "
                f"that end in {', '.join((*PARQUET, *TEXTS))}; {', '.join(COMPRESSIONS)} may follow"
            )
        found += sorted(files, key=_natural)
    [(path, times)] = Counter(_without_compression(p.resolve()) for p in found).most_common(1)
    if times > 1:
        raise DataError(f"{key} names {path} twice, maybe compressed; name each file once")
    return found


def read_pieces(
    path: Path,
    schema: Schema | TextForm,
    columns: Sequence[str],
    on_broken: Callable[[int, str], None] = lambda number, reason: None,
) -> Iterator[Piece]:
    """Yield the rows of a file, with some of its columns.

    Args:
        schema: the format of text files.
        on_broken: called with the number of a row that has too few or too many values, and with
            what is wrong; it is left out of the pieces.

    Raises:
        DataError: the file lacks a column, is damaged or cannot be read.
    """
    found = file_columns(path, schema)
    if missing := [name for name in columns if name not in found]:
        raise DataError(
            f"{path} has no column {missing[0]!r}; it has {', '.join(found)[:1000]}; correct the "
            "schema (of a text also its separator), or leave the file out"
        )
    with _readable_errors(path):
        if path.suffix in PARQUET:
            yield from _parquet_pieces(path, columns)
        else:
            yield from _text_pieces(path, schema, columns, on_broken)


def count_rows(path: Path, schema: Schema) -> int:
    """Return the number of rows of a file; for a text file, its lines, which is about the same."""
    with _readable_errors(path):
        if path.suffix in PARQUET:
            return int(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item())
        with _text_stream(path) as stream:
            num_lines = sum(
                data.count(b"\n") for data in iter(lambda: stream.read(PIECE_BYTES), b"")
            )
        return max(0, num_lines - (schema.columns is None))


def file_columns(path: Path, schema: Schema | TextForm) -> list[str]:
    """Return the names of the columns of a file."""
    with _readable_errors(path):
        if path.suffix in PARQUET:
            return pl.scan_parquet(path, glob=False).collect_schema().names()
        if schema.columns is not None:
            return list(schema.columns)
        with _text_stream(path) as stream:
            return list(_text_reader(stream, path, schema).schema.names)


def _parquet_pieces(path: Path, columns: Sequence[str]) -> Iterator[Piece]:
    frame = pl.scan_parquet(path, glob=False).select(pl.selectors.by_name(*columns))
    number = 0
    for batch in frame.collect_batches(chunk_size=PIECE_ROWS, maintain_order=True, lazy=True):
        for piece in batch.iter_slices(PIECE_ROWS):
            yield Piece(piece, np.arange(number, number + len(piece)))
            number += len(piece)


def _text_pieces(
    path: Path,
    schema: Schema | TextForm,
    columns: Sequence[str],
    on_broken: Callable[[int, str], None],
) -> Iterator[Piece]:
    broken: list[int] = []
    num_before = 1 + (schema.columns is None)  # pyarrow counts from 1, with the header

    def leave_out(row: Any) -> str:
        broken.append(row.number - num_before)
        on_broken(
            broken[-1], f"has {row.actual_columns} values; it must have {row.expected_columns}"
        )
        return "skip"

    num_read = 0
    with _text_stream(path) as stream:
        for batch in _text_reader(stream, path, schema, columns, leave_out):
            read = np.arange(num_read, num_read + batch.num_rows)
            num_read += batch.num_rows
            # the number of broken rows before each row that was read
            skipped = np.searchsorted(np.array(broken) - np.arange(len(broken)), read, side="right")
            yield Piece(_as_strings(batch), read + skipped)


def _text_reader(
    stream: Any,
    path: Path,
    schema: Schema | TextForm,
    columns: Sequence[str] = (),
    on_broken: Callable[[Any], str] = lambda row: "skip",
) -> Any:
    """Return pyarrow's reader of a text file, whose columns are bytes."""
    separator = schema.separator or TEXTS.get(_without_compression(path).suffix, ",")
    return csv.open_csv(
        stream,
        # threads would lose the numbers of broken rows
        csv.ReadOptions(use_threads=False, block_size=PIECE_BYTES, column_names=schema.columns),
        csv.ParseOptions(
            delimiter=separator,
            quote_char=False if separator == "\t" else '"',
            newlines_in_values=separator != "\t",
            invalid_row_handler=on_broken,
        ),
        csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.binary()), include_columns=list(columns)
        ),
    )


def _as_strings(batch: Any) -> pl.DataFrame:
    """Return the columns as strings; bytes that are not UTF-8 become U+FFFD."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            texts = column.cast(pa.string())
        except pa.ArrowInvalid:
            texts = pa.array([value.decode(errors="replace") for value in column.to_pylist()])
        columns[name] = pl.Series(name, pl.from_arrow(texts))
    return pl.DataFrame(columns)


def _text_stream(path: Path) -> Any:
    """Open a text file, unpacked if its name says that it is compressed."""
    return pa.input_stream(str(path), compression="detect")


@contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    """Turn errors of the readers into DataErrors that name the file."""
    try:
        yield
    except (pa.ArrowException, pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{path.absolute()} does not exist; correct the path") from None
        raise DataError(
            f"{path} cannot be read: {' '.join(str(error).split())[:300]}; it may be truncated or "
            "damaged: fetch it again, or leave it out"
        ) from error


def _files_of(path: Path) -> list[Path]:
    """Return the file at a path, or the readable files in a folder."""
    if not path.is_dir():
        return [path]
    readable = (*PARQUET, *TEXTS)
    return [
        file
        for file in path.rglob("*")
        if not file.is_dir()
        and _without_compression(file).suffix in readable
        and not any(
            part[0] in "._" or part.endswith(".partial")  # of a killed scoring
            for part in file.relative_to(path).parts
        )
    ]


def _without_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts day_2 before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
