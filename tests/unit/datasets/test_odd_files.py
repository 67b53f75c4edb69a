"""Odd and damaged files: rows are named and left out, or the file is refused with what to do."""

import bz2
import gzip
import re
from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet

from dlrm_sharded.datasets.table_dataset import TableDataset
from dlrm_sharded.files.errors import ConfigError, DataError

NUM_ROWS = 120
SCHEMA: dict[str, Any] = {
    "label": "y",
    "min_count": 1,
    "dense": {"price": {"standardize": True}},
    "categorical": {
        "user": {},
        "day": {"ids": "as_is", "rows": 7},
        "hashed": {"ids": "hash", "rows": 50},
        "seen": {"longest": 3},
    },
}
COLUMNS = ["y", "price", "user", "day", "hashed", "seen"]
GOOD = pl.DataFrame(
    {
        "y": [row % 2 for row in range(NUM_ROWS)],
        "price": [row * 0.5 for row in range(NUM_ROWS)],
        "user": [f"ü{row % 9}" for row in range(NUM_ROWS)],
        "day": [row % 7 for row in range(NUM_ROWS)],
        "hashed": [row % 33 for row in range(NUM_ROWS)],
        "seen": [[row % 5, row % 3] for row in range(NUM_ROWS)],
    }
)
TEXT = GOOD.with_columns(pl.col("seen").cast(pl.List(pl.String)).list.join("|")).write_csv()
LINES = TEXT.splitlines(keepends=True)


def converted(path: Path, max_malformed_share: float = 0.01, **schema: Any) -> TableDataset:
    """Return the dataset of a good file and of the one at `path`, which was read."""
    is_parquet = path.suffix == ".parquet"
    good = path.with_name("a.parquet" if is_parquet else "a.csv")
    if is_parquet:
        GOOD.write_parquet(good)
    else:
        good.write_text(TEXT)
    seen = {"longest": 3} if is_parquet else {"longest": 3, "split": "|"}
    schema = SCHEMA | {"categorical": SCHEMA["categorical"] | {"seen": seen}} | schema
    data = TableDataset(
        [str(good), str(path)],
        schema,
        batch_size=4,
        val_share=0,
        blocks_dir=path.with_name("blocks"),
        block_rows=64,
        max_malformed_share=max_malformed_share,
    )
    for index in range(data.num_batches("train")):
        batch = data.batch("train", index, rank=0, world_size=1)
        assert np.isfinite(batch.dense_features.numpy()).all()
    return data


def check_outcome(
    path: Path, outcome: str | int, caplog: pytest.LogCaptureFixture, **options: Any
) -> None:
    """Check that a file is refused with a pattern, or which of its rows, from 1 on, is left out."""
    if isinstance(outcome, str):
        with pytest.raises((DataError, ConfigError), match=outcome) as error:
            converted(path, **options)
        assert path.name in str(error.value)
        assert {one.name for one in path.parent.iterdir()} <= {path.name, "a.csv", "a.parquet"}
        return
    num_rows = converted(path, **options)._blocks.manifest.parts[1].num_rows
    assert not {*path.parent.glob("*.partial"), *path.parent.glob("*.lock")}
    named = re.findall(rf"{path.name}: 1 of .*\n  row (\d+): (\w+ is|has \d+ values)", caplog.text)
    assert [int(row) for row, _ in named] == ([outcome] if outcome else [])
    assert num_rows > 0 or not outcome


WRONG_TYPE = r"b.parquet: column '\w+' has .*, and the schema says"
NUMBERS, IDS, LISTS = ("y", "price"), ("user", "day", "hashed"), ("seen",)
ONLY_BAD = "120 of 120 rows so far are malformed"
INT_LIST = pl.List(pl.Int64)

OF_ALL_ROWS = [
    # columns, value of all rows, type, outcome: a refusal, or 0 for none
    *((COLUMNS, {"a": 1}, None, WRONG_TYPE), (COLUMNS, [[1]], None, WRONG_TYPE)),
    *((COLUMNS, [{"a": 1}], None, WRONG_TYPE), (COLUMNS, b"\xff", None, WRONG_TYPE)),
    (COLUMNS, timedelta(1), None, WRONG_TYPE),
    ((*NUMBERS, *IDS), [1], None, WRONG_TYPE),
    ((*NUMBERS, *IDS), [1, 2], pl.Array(pl.Int64, 2), WRONG_TYPE),
    *((LISTS, 1, None, WRONG_TYPE), (LISTS, "1", None, WRONG_TYPE)),
    *((NUMBERS, date(2020, 1, 1), None, WRONG_TYPE), (NUMBERS, "1", pl.Categorical, WRONG_TYPE)),
    (("user", "hashed"), date(2020, 1, 1), None, 0),
    (("user", "hashed"), 2**64 - 1, pl.UInt64, 0),
    (("user", "day", "hashed"), "1", pl.Categorical, 0),
    *((IDS, 0.5, None, "values that are no integers"), (LISTS, [0.5], None, "no integers")),
    *((("y", *IDS), 1.0, None, 0), ((*NUMBERS, *IDS), "1", None, 0)),
    *(((*NUMBERS, *IDS), 1, pl.Int8, 0), ((*NUMBERS, *IDS), 1, pl.Int128, 0)),
    *(((*NUMBERS, "user"), True, None, 0), ((*NUMBERS, "user"), Decimal("1.00"), None, 0)),
    *(
        (("price", "user", "hashed", "seen"), None, pl.Null, 0),
        (("y", "day"), None, None, ONLY_BAD),
    ),
    *((("y",), 0.5, None, ONLY_BAD), (("y",), 2**64 - 1, pl.UInt64, ONLY_BAD)),
    *((LISTS, [], None, 0), (LISTS, [None], None, 0), (LISTS, [1, 2], pl.Array(pl.Int64, 2), 0)),
    *((LISTS, ["a", None, ""], None, 0), (LISTS, [date(2020, 1, 1)], None, 0)),
]


NAN, INF = float("nan"), float("inf")
OF_ONE_ROW = [
    # column, value, type, outcome: the row that is left out, 0 for none, or a refusal
    *(("y", value, pl.Float64, 8) for value in (None, NAN, INF, 2, -1, 0.5)),
    *(("y", "what", pl.String, 8), ("price", "what", pl.String, 8)),
    *(("price", value, pl.Float64, 8) for value in (INF, -INF, 1e39)),
    *(("price", None, pl.Float64, 0), ("price", NAN, pl.Float64, 0)),
    *(("day", value, pl.Int64, 8) for value in (None, -1, 7, 2**40)),
    *(("day", NAN, pl.Float64, 8), ("day", "what", pl.String, 8)),
    *(("hashed", None, pl.Int64, 0), ("hashed", NAN, pl.Float64, 0), ("user", None, None, 0)),
    *(("hashed", value, pl.Float64, "no integers") for value in (INF, 1e30, 0.5)),
    ("seen", [1.0, INF], pl.List(pl.Float64), "no integers"),
    *(("seen", value, INT_LIST, 0) for value in (None, [], [None], list(range(10**6)))),
]


EVERY, EIGHTH = range(NUM_ROWS), (7,)
VALUES = [
    *((name, EVERY, *case) for names, *case in OF_ALL_ROWS for name in names),
    *((name, EIGHTH, *case) for name, *case in OF_ONE_ROW),
]


@pytest.mark.parametrize("case", VALUES, ids=lambda case: repr(case)[:50])
def test_values_of_parquet(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: Any) -> None:
    column, rows, value, dtype, outcome = case
    values = GOOD[column].cast(dtype or GOOD[column].dtype).to_list() if rows == EIGHTH else {}
    values = [value if row in rows else values[row] for row in range(NUM_ROWS)]
    frame = GOOD.with_columns(pl.Series(column, values, dtype=dtype, strict=False))
    frame.write_parquet(tmp_path / "b.parquet")
    check_outcome(tmp_path / "b.parquet", outcome, caplog)


def test_a_list_with_wrong_ids_is_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    GOOD.write_parquet(tmp_path / "b.parquet")
    categorical = {"seen": {"longest": 3, "ids": "as_is", "rows": 4}}
    with pytest.raises(DataError, match=r"seen is \[4, 1\]; it must be an integer from 0 to 3"):
        converted(tmp_path / "b.parquet", categorical=categorical)


def _with(line: str | bytes) -> bytes:
    """Return the text with another row 8."""
    row = line if isinstance(line, bytes) else f"{line}\n".encode()
    return "".join(LINES[:8]).encode() + row + "".join(LINES[8:]).encode()


PACKED = gzip.compress(TEXT.encode() * 50)
TEXTS = [
    # name, bytes, outcome as above
    *(("b.csv", TEXT.encode(), 0), ("b.csv", b"\xef\xbb\xbf" + TEXT.encode(), 0)),
    *(("b.csv", TEXT.replace("\n", end).encode(), 0) for end in ("\r\n", "\r", "\n\n")),
    ("b.csv", "".join(LINES[:9]).encode() + "".join(LINES[9:]).replace("\n", "\r\n").encode(), 0),
    *(("b.csv", TEXT.rstrip().encode(), 0), ("b.csv", LINES[0].encode(), 0)),
    *(("b.csv", b"", "Empty CSV"), ("b.csv", b"\n\n", "Empty CSV")),
    *(("b.csv", _with("1,2"), 8), ("b.csv", _with("1,2,3,4,5,6,7,8"), 8)),
    ("b.csv", _with("1,2") + b"1,2\n1,2\n", "3 of 123 rows in total are malformed"),
    ("b.csv", _with('1,2,"a ""b"", c\nd",4,5,6'), 0),
    ("b.csv", _with("1,2,ü,4,5,6".encode("latin-1") + b"\n"), 0),
    *(("b.csv", TEXT.encode("utf-16"), "cannot be read"), ("b.csv", _with("1,2,a\0,4,5,6"), 0)),
    ("b.csv", TEXT.replace("y,", "é,", 1).encode("latin-1"), "cannot be read"),
    *(("b.csv", TEXT.replace("user", "uSer", 1).encode(), "no column 'user'"),),
    *(("b.csv", _with(f"{value},2,a,4,5,6"), 8) for value in ("2", "-1", "0.5", "what", "", "nan")),
    *(("b.csv", _with(f"{value},2,a,4,5,6"), 0) for value in (" 1", "1.0", "1e0")),
    *(
        ("b.csv", _with(f'1,"{v}",a,4,5,6'), 8)
        for v in ("what", "1,5", "-inf", "1e400", "1e39", "NA")
    ),
    *(("b.csv", _with(f"1,{value},a,4,5,6"), 0) for value in ("", " 1.5 ", "nan", "-0")),
    *(("b.csv", _with(f"1,2,a,{value},5,6"), 8) for value in ("7", "", "-1", "1.0", "9" * 20)),
    *(("b.csv.gz", gzip.compress(TEXT.encode()), 0), ("b.csv.gz", TEXT.encode(), "inflate")),
    *(("b.csv.gz", PACKED[:-4], "Truncated"), ("b.csv.gz", PACKED[:500], "Truncated")),
    ("b.csv.gz", PACKED[:400] + b"what" + PACKED[404:], "cannot be read"),
    *(("b.csv.bz2", bz2.compress(TEXT.encode()), 0), ("b.csv.bz2", b"BZh9what", "bz2")),
    ("b.csv.zst", bytes(pa.compress(TEXT.encode(), "zstd", asbytes=True))[:-20], "Truncated"),
    ("b.tsv", TEXT.replace(",", "\t").replace("ü3", '"ü3').encode(), 0),
]


@pytest.mark.parametrize(("name", "data", "outcome"), TEXTS, ids=lambda value: repr(value)[-30:])
def test_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, data: bytes, outcome: str | int
) -> None:
    (tmp_path / name).write_bytes(data)
    check_outcome(tmp_path / name, outcome, caplog)


@pytest.mark.parametrize("row", ["3,2,a,1,5,6\n", "1,2\n"])
def test_a_file_may_have_no_usable_row(tmp_path: Path, row: str) -> None:
    (tmp_path / "b.csv").write_text(LINES[0] + row * 50)
    data = converted(tmp_path / "b.csv", max_malformed_share=1.0)
    assert [part.num_rows for part in data._blocks.manifest.parts] == [NUM_ROWS, 0]


@pytest.mark.parametrize("text", [LINES[0], f"{LINES[0]}3,2,a,1,5,6\n"])
def test_some_file_must_have_a_usable_row(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    schema = SCHEMA | {"categorical": {"user": {}}}
    data = TableDataset(
        str(tmp_path / "a.csv"), schema, batch_size=4, blocks_dir=tmp_path / "blocks"
    )
    with pytest.raises(DataError, match=r"a\.csv and the other files .* have no usable row"):
        data.num_batches("train")
    assert [one.name for one in tmp_path.iterdir()] == ["a.csv"]


def test_malformed_rows_may_be_where_the_training_rows_are(tmp_path: Path) -> None:
    """Their share is that of the file, not of its part that trains."""
    (tmp_path / "a.csv").write_text(LINES[0] + "what,2,a,1,5,6\n" * 2 + "1,2,a,1,5,6\n" * 198)
    data = TableDataset(
        str(tmp_path / "a.csv"),
        SCHEMA | {"categorical": {"user": {}}},
        batch_size=4,
        val_share=0.6,
        max_malformed_share=0.01,
        blocks_dir=tmp_path / "blocks",
    )
    assert (data.num_batches("train"), data.num_batches("val")) == (78 // 4, 120 // 4)


def _row_groups(path: Path) -> None:
    table = GOOD.to_arrow()
    with parquet.ParquetWriter(path, table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0)):
            writer.write_table(part)


def _twice_named(path: Path) -> None:
    table = GOOD.to_arrow()
    names = [*table.column_names, "user"]
    parquet.write_table(pa.table([*table.columns, table.column("user")], names=names), path)


def _cut(size: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        GOOD.write_parquet(path)
        path.write_bytes(path.read_bytes()[:size])

    return write


@pytest.mark.parametrize(
    ("write", "outcome"),
    [
        (GOOD.head(0).write_parquet, 0),
        (_row_groups, 0),
        (_twice_named, "'user' has more than one"),
        *((_cut(size), "cannot be read") for size in (0, 4, 1000, -100, -4, -1)),
        *((GOOD.drop(name).write_parquet, f"no column '{name}'") for name in COLUMNS),
        (lambda path: path.write_bytes(TEXT.encode()), "cannot be read"),
    ],
)
def test_parquet_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Callable[[Path], Any], outcome: Any
) -> None:
    write(tmp_path / "b.parquet")
    check_outcome(tmp_path / "b.parquet", outcome, caplog)


def test_names_of_columns_may_be_anything(tmp_path: Path) -> None:
    names = ["ist geklickt, ja?", "price, $", "*", "größe", 'a "b"', "x: y"]
    schema = {
        "label": names[0],
        "dense": {names[1]: None},
        "categorical": {name: {"ids": "hash", "rows": 9} for name in names[2:5]},
    }
    frame = GOOD.rename(dict(zip(COLUMNS, names, strict=True))).drop(names[5])
    frame.write_parquet(tmp_path / "a.parquet")
    frame.write_csv(tmp_path / "b.csv")
    for file in ("a.parquet", "b.csv"):
        data = TableDataset(
            str(tmp_path / file), schema, batch_size=2, blocks_dir=tmp_path / f"{file}.blocks"
        )
        batch = data.batch("train", 1, rank=0, world_size=1)
        assert batch.dense_features.tolist() == [[1.0], [1.5]]
