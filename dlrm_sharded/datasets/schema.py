"""The schema of a user's files: which columns are the label, dense features, or ids of a table.

    label: clicked
    key: [session]                    # columns copied to scores
    dense:
      amount: {log: true, standardize: true}
      age: {fill: 30, clip: [0, 100]}
    categorical:
      user: {dim: 64}
      weekday: {ids: as_is, rows: 7}
      seen: {table: item, longest: 50}  # a list of ids, which shares the table of another column
      item: {min_count: 5}

Columns of a file that the schema does not name are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.json_forms import form_of, read_form
from dlrm_sharded.files.limited import Finite, PositiveInt, Text
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE

MAX_TABLE_ROWS = 2**31 - 1
"""Ids are stored in 32 bits."""

NUM_RESERVED = 2
"""First rows of a vocabulary's table, before its ids: for missing ids, and for rare or new ones."""


@dataclass(frozen=True, slots=True)
class DenseColumn:
    """A column of numbers, which becomes one dense feature.

    Args:
        fill: replaces missing values; None for 0, or for the mean with `standardize`.
        clip: smallest and largest value; either may be null.
        log: take log(1 + x), after negative values are set to 0.
        standardize: subtract the mean of the training rows, and divide by their standard deviation.
    """

    fill: Finite | None = None
    clip: tuple[Finite | None, Finite | None] | None = None
    log: bool = False
    standardize: bool = False


@dataclass(frozen=True, slots=True)
class CategoricalColumn:
    """A column of strings or integers, or of lists of them, which look up rows of a table.

    Args:
        ids: how a value becomes a row: "vocabulary" (or None) gives each value of the training rows
            its own, "hash" hashes its text to a row from 1 on (row 0 is for missing values),
            "as_is" takes the integer itself.
        rows: rows of the table; for a vocabulary, their largest number, and `min_count` rises until
            the ids fit.
        min_count: rarer values of a vocabulary share one row; None for the schema's `min_count`.
        longest: makes it a list column: the number of first ids of a sample that are used.
        split: what separates the ids of a list that is written as text.
        table: name of the table; None for the column's name. Columns of one table share its ids.
        dim: width of the table; None for the schema's `dim`.
    """

    ids: Literal["vocabulary", "hash", "as_is"] | None = None
    rows: PositiveInt | None = None
    min_count: PositiveInt | None = None
    longest: PositiveInt | None = None
    split: Text | None = None
    table: Text | None = None
    dim: PositiveInt | None = None


TABLE_OPTIONS = ("ids", "rows", "min_count", "dim")
"""Options of a table: it is enough to give each of them at one of the table's columns."""


@dataclass(frozen=True, slots=True)
class TableOptions:
    """How the values of a table's columns become its rows; see `CategoricalColumn`.

    Args:
        columns: its columns, in the order of their features.
        rows: rows of the table; for a vocabulary, their largest number, or None for no limit.
    """

    name: str
    columns: tuple[str, ...]
    ids: str
    rows: int | None
    min_count: int
    dim: int


@dataclass(frozen=True, slots=True)
class Schema:
    """Describes the columns of a user's files.

    Args:
        label: column of 0 and 1.
        dense: columns of numbers, by name; null takes the defaults.
        categorical: columns of ids, by name; null takes the defaults.
        key: columns that are copied to a file of scores, such as an id of the row.
        dim, min_count: defaults of the tables.
        max_rows: default of `rows` for vocabularies; None for no limit.
        separator: separator of the columns in a text file; None for a tab in *.tsv and *.txt, else
            a comma.
        columns: names of the columns of text files that have no header, in their order.
    """

    label: Text
    dense: Mapping[str, DenseColumn | None] = field(default_factory=dict)
    categorical: Mapping[str, CategoricalColumn | None] = field(default_factory=dict)
    key: tuple[Text, ...] = ()
    dim: PositiveInt = 16
    min_count: PositiveInt = 2
    max_rows: PositiveInt | None = None
    separator: Text | None = None
    columns: tuple[Text, ...] | None = None

    def __post_init__(self) -> None:
        if not self.categorical:
            raise ValueError("categorical names no column, so there is no table to train")
        names = [self.label, *self.dense, *self.categorical]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{twice[0]!r} is named twice, as label, dense or categorical")
        if len({*self.key, "score"}) <= len(self.key):
            raise ValueError(f"key is {[*self.key]}; it must have no 'score' and no name twice")
        if self.separator is not None and not re.fullmatch(
            r'(?!["\r\n])[\x01-\x7f]', self.separator
        ):
            raise ValueError(f"separator is {self.separator!r}; it must be one ASCII character")
        if self.columns is not None:
            if len(set(self.columns)) < len(self.columns):
                raise ValueError("columns names a column twice")
            if missing := [n for n in (*names, *self.key) if n not in self.columns]:
                raise ValueError(f"columns, the names of a file without a header, lacks {missing}")
        for name, column in self.dense_columns.items():
            low, high = column.clip or (None, None)
            if low is not None and high is not None and low > high:
                raise ValueError(
                    f"dense.{name}.clip is [{low}, {high}]; give the smaller one first"
                )
        for name, ids in self.categorical_columns.items():
            if ids.split is not None and ids.longest is None:
                raise ValueError(f"categorical.{name} has split, but not longest, the ids to use")
        self.tables()

    @property
    def dense_columns(self) -> dict[str, DenseColumn]:
        return {name: column or DenseColumn() for name, column in self.dense.items()}

    @property
    def categorical_columns(self) -> dict[str, CategoricalColumn]:
        """The columns in the order of their features: columns of one id, then lists."""
        columns = {name: one or CategoricalColumn() for name, one in self.categorical.items()}
        return dict(sorted(columns.items(), key=lambda item: item[1].longest is not None))

    @property
    def num_dense(self) -> int:
        """Number of dense features; without a dense column there is one, which is 0."""
        return max(1, len(self.dense))

    def tables(self) -> dict[str, TableOptions]:
        """Return the tables by name, in the order of their first features.

        Raises:
            ValueError: options of a table contradict each other.
        """
        columns: dict[str, list[str]] = {}
        for name, column in self.categorical_columns.items():
            columns.setdefault(column.table or name, []).append(name)
        return {name: self._table(name, tuple(of)) for name, of in columns.items()}

    @property
    def used_columns(self) -> list[str]:
        """The columns of files that training reads."""
        return [self.label, *self.dense, *self.categorical]

    def to_json(self) -> dict[str, Any]:
        """Return the schema in the form that `read_schema` reads."""
        found = form_of(self)
        for group in ("dense", "categorical"):
            columns = {name: form_of(one) if one else {} for name, one in found[group].items()}
            found[group] = columns
        return {key: value for key, value in found.items() if value not in ({}, ())}

    def of_conversion(self) -> dict[str, Any]:
        """Return the part of the schema that decides converted data: all but the tables' widths."""
        found = self.to_json()
        found.pop("dim", None)
        found["categorical"] = {
            name: {key: value for key, value in column.items() if key != "dim"}
            for name, column in found["categorical"].items()
        }
        return found

    def _table(self, name: str, columns: tuple[str, ...]) -> TableOptions:
        given: dict[str, Any] = {}
        for option in TABLE_OPTIONS:
            values = {getattr(self.categorical_columns[column], option) for column in columns}
            if len(values - {None}) > 1:
                raise ValueError(
                    f"the columns of table {name!r} have different values of {option}: "
                    f"{sorted(map(str, values - {None}))}; give it once"
                )
            given[option] = next(iter(values - {None}), None)
        ids, rows = given["ids"] or "vocabulary", given["rows"]
        if ids == "vocabulary":
            rows = rows or self.max_rows
        elif rows is None:
            raise ValueError(f"table {name!r} has ids: {ids}, which needs rows, those of the table")
        elif given["min_count"] is not None:
            raise ValueError(f"table {name!r} has min_count, which only a vocabulary uses")
        least = {"vocabulary": NUM_RESERVED, "hash": 2, "as_is": 1}[ids]
        if rows is not None and not least <= rows <= MAX_TABLE_ROWS:
            raise ValueError(
                f"table {name!r}: rows is {rows:,}; it must be {least} to {MAX_TABLE_ROWS:,}"
            )
        dim = given["dim"] or self.dim
        if dim % COLUMN_MULTIPLE:
            raise ValueError(f"table {name!r} has dim {dim}; FBGEMM needs a multiple of 4")
        return TableOptions(name, columns, ids, rows, given["min_count"] or self.min_count, dim)


def read_schema(raw: object, *, name: str = "data.schema") -> Schema:
    """Return the schema that a mapping, or the yaml file at a path, describes.

    Raises:
        ConfigError: it is not a valid schema; the message says where.
        DataError: the file cannot be read.
    """
    if isinstance(raw, str | Path):
        name, path = str(raw), Path(raw)
        try:
            raw = yaml.safe_load(path.read_bytes())
        except FileNotFoundError:
            raise DataError(
                f"{path.absolute()} does not exist; `dlrm-data inspect FILES` writes a schema"
            ) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not yaml: {error}") from error
    return read_form(raw, Schema, name=name, error=ConfigError)


def schema_yaml(schema: Schema, comments: Mapping[str, str] | None = None) -> str:
    """Return a schema as yaml, one line per column, with the columns' comments behind them."""
    lines: list[str] = []
    for key, value in schema.to_json().items():
        if not isinstance(value, Mapping):
            lines.append(f"{key}: {_flow(value)}{_comment(comments, value)}")
            continue
        lines.append(f"{key}:")
        lines += [
            f"  {_flow(name)}: {_flow(options)}{_comment(comments, name)}"
            for name, options in value.items()
        ]
    return "\n".join(lines) + "\n"


def _flow(value: object) -> str:
    style = '"' if isinstance(value, str) and "\n" in value else None
    text: str = yaml.safe_dump(
        value, default_flow_style=True, default_style=style, width=2**20, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(comments: Mapping[str, str] | None, name: object) -> str:
    text = (comments or {}).get(name, "") if isinstance(name, str) else ""
    return f"  # {text}" if text else ""
