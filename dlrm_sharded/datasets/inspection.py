"""Proposes the schema of files: what each column seems to be, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dlrm_sharded.datasets.schema import CategoricalColumn, DenseColumn, Schema
from dlrm_sharded.datasets.source_files import TextForm, file_columns, read_pieces
from dlrm_sharded.files.errors import DataError

SAMPLE_ROWS = 100_000
"""Number of first rows that are looked at."""

LABEL_NAMES = re.compile(r"(is_?)?(label|click(ed)?|target|converted|conversion|y)", re.IGNORECASE)
ID_NAMES = re.compile(r".*(^|_)(id|ids|code|zip|hash|key|token)s?$|.*[a-z](Id|ID|Code)$")
SPLITS = ("|", ";", " ", ",")
"""Separators that may divide a text into ids, the likeliest first."""

MAX_LONGEST = 100
"""Largest `longest` that is proposed."""

SEPARATORS = (";", "\t", "|", ",")
"""Separators that may divide a text file into columns."""

LABELS = 0, 1, "0", "1", "0.0", "1.0"

FEW_VALUES, SKEWED = 20, 20.0
"""Largest number of distinct integers for which a column holds ids, and smallest ratio of the
largest number to the median for which the logarithm is taken."""


@dataclass(frozen=True, slots=True)
class ColumnReport:
    """Describes a column of the files, and its part in the schema.

    Args:
        kind: label, key, dense, categorical or left out.
        options: options of the schema's column, if it is dense or categorical.
        num_distinct: number of distinct values; None for lists.
        missing: share of the rows without a value.
        why: the reason for `kind`.
    """

    name: str
    dtype: str
    kind: str
    options: DenseColumn | CategoricalColumn | None
    num_distinct: int | None
    missing: float
    why: str


def inspect(
    paths: Sequence[Path], label: str | None = None, separator: str | None = None
) -> list[ColumnReport]:
    """Return a report of each column, the label first, from the first rows of the first file.

    Args:
        label: the column of the labels; None for the first one with a usual name, such as "click".
        separator: separator of columns in text files; None for the usual one of the file's suffix.

    Raises:
        DataError: there is no such label, or another file has other columns.
    """
    form = TextForm(separator)
    columns = file_columns(paths[0], form)
    if len(columns) == 1 and (found := [s for s in SEPARATORS if s in columns[0]]):
        raise DataError(
            f"{paths[0]} has one column, {columns[0]!r}; give separator={found[0]!r} if that "
            "separates its columns"
        )
    for path in paths[1:]:
        if lacking := set(columns) ^ set(file_columns(path, form)):
            raise DataError(
                f"{path} and {paths[0]} do not both have the column {min(lacking)!r}; correct or "
                "leave out one of them"
            )
    frame = _first_rows(paths[0], form, columns)
    if label is None:
        label = next((name for name in columns if _is_label(frame[name])), None)
    if label is None or label not in columns:
        raise DataError(
            f"{paths[0]} has no column {label or 'of 0 and 1 that is named like a label'}; give "
            f"label=COLUMN, one of {', '.join(columns)}; files without a header need columns in a "
            "schema of their own"
        )
    reports = [_report(frame[name]) for name in columns if name != label]
    labels = frame[label]
    known = labels.drop_nulls().to_list()
    if others := sorted({str(value) for value in known if value not in LABELS}):
        raise DataError(
            f"{paths[0]}: the label {label} is {others[0]} in some rows; it must be 0 or 1; give "
            "another label=COLUMN, or correct the files"
        )
    counts, missing, mean = labels.n_unique(), _missing(labels), labels.mean()
    why = f"the mean is {mean:.3g}" if isinstance(mean, float) else "all are missing"
    return [ColumnReport(label, str(labels.dtype), "label", None, counts, missing, why), *reports]


def proposed_schema(reports: Sequence[ColumnReport], separator: str | None = None) -> Schema:
    """Return the schema that reports describe.

    Raises:
        DataError: no column is categorical.
    """
    categorical = {r.name: r.options for r in reports if isinstance(r.options, CategoricalColumn)}
    if not categorical:
        raise DataError(
            "no column seems to be categorical, and a table needs one; write the schema"
        )
    return Schema(
        label=next(report.name for report in reports if report.kind == "label"),
        key=tuple(report.name for report in reports if report.kind == "key"),
        dense={r.name: r.options for r in reports if isinstance(r.options, DenseColumn)},
        categorical=categorical,
        separator=separator,
    )


def _first_rows(path: Path, form: TextForm, columns: Sequence[str]) -> pl.DataFrame:
    """Return the first rows of a file; columns of a text file get the types of their values."""
    frames, num_rows = [], 0
    for piece in read_pieces(path, form, columns):
        frames.append(piece.frame)
        num_rows += len(piece.frame)
        if num_rows >= SAMPLE_ROWS:
            break
    if not num_rows:
        raise DataError(f"{path} has no rows; name another file first")
    frame = pl.concat(frames).head(SAMPLE_ROWS)
    return frame.with_columns(_typed(column) for column in frame.get_columns())


def _typed(column: pl.Series) -> pl.Series:
    """Return a column of texts as integers or floats if all of its values are."""
    if column.dtype in (pl.Categorical, pl.Enum):
        return column.cast(pl.String)
    if column.dtype != pl.String:
        return column
    texts = column.set(column == "", None)
    for dtype in (pl.Int64, pl.Float64):
        numbers = texts.cast(dtype, strict=False)
        if numbers.null_count() == texts.null_count() < len(texts):
            return numbers
    return texts


def _is_label(column: pl.Series) -> bool:
    numbers = column.drop_nulls()
    if not (column.dtype.is_numeric() or column.dtype == pl.Boolean) or not len(numbers):
        return False
    return bool(LABEL_NAMES.fullmatch(column.name)) and set(numbers.unique()) <= {0, 1}


def _report(column: pl.Series) -> ColumnReport:
    """Decide the kind of a column that is not the label."""
    name, dtype = column.name, column.dtype
    missing, num_distinct, rows = _missing(column), None, len(column)

    def report(
        kind: str, options: DenseColumn | CategoricalColumn | None, why: str
    ) -> ColumnReport:
        return ColumnReport(name, str(dtype), kind, options, num_distinct, missing, why)

    if not name:
        return report("left out", None, "it has no name")
    if isinstance(dtype, pl.List | pl.Array) and not (
        dtype.inner.is_nested() or dtype.inner.is_float()
    ):
        lengths = column.list.len() if isinstance(dtype, pl.List) else pl.Series([dtype.size])
        return report("categorical", _list_column(lengths), _list_reason(lengths))
    if dtype.is_temporal() or dtype.is_nested() or dtype == pl.Binary:
        return report("left out", None, f"{dtype} is neither a number nor an id")
    num_distinct = column.n_unique()
    if num_distinct <= 1:
        return report("left out", None, "all rows have one value")
    is_id = bool(ID_NAMES.fullmatch(name))
    if not dtype.is_float() and num_distinct == rows > FEW_VALUES and (dtype == pl.String or is_id):
        return report("key", None, "each row has a value of its own")
    if dtype == pl.String:
        for split in SPLITS:
            counts = column.drop_nulls().str.count_matches(split, literal=True)
            if counts.to_numpy().mean() >= 0.5 and num_distinct > FEW_VALUES:
                return report(
                    "categorical",
                    _list_column(counts + 1, split),
                    f"{_list_reason(counts + 1)}, separated by {split!r}",
                )
        return report("categorical", CategoricalColumn(), "strings")
    if dtype.is_integer() and is_id:
        return report("categorical", CategoricalColumn(), "integers, named like an id")
    if dtype == pl.Boolean or (dtype.is_integer() and num_distinct <= FEW_VALUES):
        return report("categorical", CategoricalColumn(), f"{num_distinct} different values")
    numbers = column.cast(pl.Float64).drop_nulls().to_numpy()
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return report("left out", None, "it has no finite number")
    median, largest = float(np.median(numbers)), float(numbers.max())
    is_skewed = bool(numbers.min() >= 0) and largest > SKEWED * max(median, 1.0)
    why = f"numbers up to {largest:,.6g}, with a median of {median:,.6g}"
    return report("dense", DenseColumn(log=is_skewed, standardize=True), why)


def _list_column(lengths: pl.Series, split: str | None = None) -> CategoricalColumn:
    longest = np.percentile(lengths.fill_null(0).to_numpy(), 99)
    return CategoricalColumn(longest=min(max(math.ceil(longest), 1), MAX_LONGEST), split=split)


def _list_reason(lengths: pl.Series) -> str:
    numbers = lengths.fill_null(0).to_numpy()
    return f"lists of {numbers.mean():.3g} ids, up to {numbers.max():,}"


def _missing(column: pl.Series) -> float:
    if column.dtype.is_float():
        column = column.fill_nan(None)
    return column.null_count() / max(1, len(column))
