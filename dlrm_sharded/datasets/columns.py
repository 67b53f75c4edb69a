"""Turns columns of files into the values that a model takes: numbers, and keys of ids.

A value of a categorical column is identified by its text, so that 5 in a Parquet file and "5" in a
text file are one id. Its key is a 64-bit hash of the text, which is the same everywhere: among 50
million values, the probability that two share a key is 0.007 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from dlrm_sharded.datasets.counter_random import random_bits, stream_key
from dlrm_sharded.datasets.schema import CategoricalColumn, DenseColumn, Schema, TableOptions
from dlrm_sharded.files.errors import DataError

Keys = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

MISSING_KEY = np.uint64(0)
"""Key of a missing value; no text has it."""

MAX_KEY = np.uint64(2**64 - 2)
"""Largest key; the number above it ends a vocabulary."""

_WORD = 8
_LOW_BYTES = np.array([2 ** (8 * count) - 1 for count in range(_WORD)] + [2**64 - 1], np.uint64)
_TEXT_KEY = stream_key("text of an id")


@dataclass(frozen=True, slots=True)
class IdColumn:
    """Ids of one categorical column in n samples.

    Args:
        lengths: [n] int32, number of ids of each sample; all are 1 unless it is a list column.
        ids: [sum of lengths], uint64 keys of a vocabulary, else int32 rows of the table.
    """

    lengths: npt.NDArray[np.int32]
    ids: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """Values of a column that cannot be used.

    Args:
        rows: [n], which of n samples have them.
        must: what the value must be.
    """

    column: str
    rows: Bools
    must: str


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """The values of n samples, before vocabularies and standardization are applied.

    Args:
        labels: [n] of 0 and 1; zeros if no label was asked for.
        dense: by column, [n] fp64, nan where missing.
        ids: by column.
        faults: what is wrong with some of the samples, whose values are meaningless.
    """

    labels: npt.NDArray[np.uint8]
    dense: dict[str, npt.NDArray[np.float64]]
    ids: dict[str, IdColumn]
    faults: list[Fault]


def parse(frame: pl.DataFrame, schema: Schema, *, with_label: bool = True) -> ParsedRows:
    """Read the columns of a schema.

    Raises:
        DataError: the type of a column's values does not fit the schema.
    """
    labels, faults = np.zeros(len(frame), np.uint8), []
    if with_label:
        labels, wrong = _labels(frame[schema.label])
        faults.append(Fault(schema.label, wrong, "0 or 1"))
    dense: dict[str, npt.NDArray[np.float64]] = {}
    for name, column in schema.dense_columns.items():
        dense[name], wrong = _numbers(frame[name], column)
        faults.append(Fault(name, wrong, "a finite number, or empty"))
    ids: dict[str, IdColumn] = {}
    for table in schema.tables().values():
        for name in table.columns:
            ids[name], wrong = _ids(frame[name], schema.categorical_columns[name], table)
            faults.append(Fault(name, wrong, f"an integer from 0 to {(table.rows or 0) - 1:,}"))
    return ParsedRows(labels, dense, ids, [fault for fault in faults if fault.rows.any()])


def keys_of(texts: pl.Series) -> Keys:
    """Return the keys [N] of texts; `MISSING_KEY` for null and the empty text."""
    # a null of a Parquet file may have the length of another value
    array = texts.fill_null("").to_arrow(compat_level=pl.CompatLevel.oldest())
    _, offset_buffer, data = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    content = np.frombuffer(data or b"", np.uint8)
    padded = np.append(content, np.zeros(_WORD, np.uint8))
    # the 8 bytes that begin at each byte, as one number
    words = np.ndarray((len(content) + 1,), "<u8", padded, strides=(1,))
    first, left = offsets[:-1], np.diff(offsets)
    keys = left.astype(np.uint64)
    keys ^= words[first] & _LOW_BYTES[np.minimum(left, _WORD)]
    keys = random_bits(_TEXT_KEY, keys)
    longer = np.flatnonzero(left > _WORD)
    while len(longer):
        first, left = first + _WORD, left - _WORD
        found = words[first[longer]] & _LOW_BYTES[np.minimum(left[longer], _WORD)]
        keys[longer] = random_bits(_TEXT_KEY, keys[longer] ^ found)
        longer = longer[left[longer] > _WORD]
    keys = np.clip(keys, MISSING_KEY + np.uint64(1), MAX_KEY)
    keys[offsets[:-1] == offsets[1:]] = MISSING_KEY
    return keys


def _labels(values: pl.Series) -> tuple[npt.NDArray[np.uint8], Bools]:
    """Return labels [n], and which values are neither 0 nor 1."""
    numbers, _ = _floats(values)
    wrong = ~np.isin(numbers, (0.0, 1.0))
    return np.where(wrong, 0, numbers).astype(np.uint8), wrong


def _numbers(values: pl.Series, column: DenseColumn) -> tuple[npt.NDArray[np.float64], Bools]:
    """Return numbers [n], nan where missing, and which values are texts or not finite in fp32."""
    numbers, wrong = _floats(values)
    wrong |= np.abs(numbers) > np.finfo(np.float32).max
    if column.fill is not None:
        numbers = np.where(np.isnan(numbers), column.fill, numbers)
    if column.clip is not None:
        low, high = column.clip
        numbers = np.clip(
            numbers, -np.inf if low is None else low, np.inf if high is None else high
        )
    if column.log:
        numbers = np.log1p(np.maximum(numbers, 0.0))
    return numbers, wrong


def _ids(
    values: pl.Series, column: CategoricalColumn, table: TableOptions
) -> tuple[IdColumn, Bools]:
    """Return the ids of n samples, and which samples have ids beyond the table's rows."""
    lengths, texts = np.ones(len(values), np.int32), values
    if column.longest is not None:
        lengths, texts = _cut_lists(values, column.longest, column.split)
    texts = _texts(texts)
    wrong = np.zeros(len(values), np.bool_)
    if table.ids == "vocabulary":
        return IdColumn(lengths, keys_of(texts)), wrong
    assert table.rows is not None, "checked by Schema"
    if table.ids == "hash":
        keys = keys_of(texts)
        rows = (keys % np.uint64(table.rows - 1) + np.uint64(1)).astype(np.int32)
        return IdColumn(lengths, np.where(keys == MISSING_KEY, 0, rows)), wrong
    numbers = texts.cast(pl.Int64, strict=False).fill_null(-1).to_numpy()
    is_wrong = (numbers < 0) | (numbers >= table.rows)
    wrong[np.repeat(np.arange(len(values)), lengths)[is_wrong]] = True
    return IdColumn(lengths, np.where(is_wrong, 0, numbers).astype(np.int32)), wrong


def _cut_lists(
    values: pl.Series, longest: int, split: str | None
) -> tuple[npt.NDArray[np.int32], pl.Series]:
    """Return the lengths of lists and their values: the first `longest` that are not missing."""
    if isinstance(values.dtype, pl.Array):
        values = values.arr.to_list()
    elif values.dtype == pl.Null:
        values = values.cast(pl.List(pl.String))
    elif split is not None and not isinstance(values.dtype, pl.List):
        texts = _texts(values)
        values = texts.set(texts == "", None).str.split(split)
    elif not isinstance(values.dtype, pl.List):
        raise DataError(
            f"column {values.name!r} has {values.dtype}, and the schema says lists (longest); "
            "give split, which separates the ids of a text, or leave longest out"
        )
    ids = pl.element()
    is_there = ids != "" if values.dtype == pl.List(pl.String) else ids.is_not_null()
    lists = values.list.eval(ids.filter(is_there)).list.head(longest)
    lengths = lists.list.len().fill_null(0).to_numpy().astype(np.int32)
    return lengths, lists.filter(pl.Series(lengths > 0)).explode()


def _floats(values: pl.Series) -> tuple[npt.NDArray[np.float64], Bools]:
    """Return numbers [n], nan where missing, and which values are texts that are not numbers."""
    dtype = values.dtype
    if not (dtype.is_numeric() or dtype in (pl.String, pl.Boolean, pl.Null)):
        raise DataError(f"column {values.name!r} has {dtype}, and the schema says numbers")
    numbers = values.cast(pl.Float64, strict=False)
    wrong = numbers.is_null().to_numpy().copy()
    if dtype == pl.String and wrong.any():  # most of these are empty
        texts = values.filter(numbers.is_null()).str.strip_chars()
        again = texts.cast(pl.Float64, strict=False)
        numbers = numbers.scatter(np.flatnonzero(wrong), again)
        wrong[wrong] = (again.is_null() & (texts != "").fill_null(value=False)).to_numpy()
    else:
        wrong[:] = False
    return numbers.fill_null(np.nan).to_numpy(), wrong


def _texts(values: pl.Series) -> pl.Series:
    """Return the texts of strings, integers, booleans and dates; null where missing."""
    dtype = values.dtype
    if dtype.is_nested() or dtype in (pl.Binary, pl.Object, pl.Duration):
        raise DataError(
            f"column {values.name!r} has {dtype}, and the schema says strings or integers; lists "
            "need longest, the ids of a sample to use"
        )
    if dtype.is_float():  # as pandas writes integers with missing values
        values = values.cast(pl.Float64).fill_nan(None)
        whole = values.cast(pl.Int64, strict=False)
        if whole.cast(pl.Float64).ne_missing(values).any():
            raise DataError(
                f"column {values.name!r} has {dtype}, with values that are no integers; the schema "
                "says ids: make it a dense column"
            )
        values = whole
    return values.cast(pl.String)
