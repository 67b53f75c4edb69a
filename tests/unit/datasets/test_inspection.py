"""`dlrm-data` proposes a schema, which can be trained as it is, and converts."""

import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from dlrm_sharded.commands import data
from dlrm_sharded.datasets.inspection import inspect, proposed_schema
from dlrm_sharded.datasets.schema import CategoricalColumn, DenseColumn, read_schema
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.testing import check_dataset
from tests.unit.datasets.tables import click_log, wide_log
from tests.unit.datasets.test_table_dataset import dataset

N = 300
RANGE = list(range(N))
PLAIN = CategoricalColumn()
PAIRS = CategoricalColumn(longest=2, split="|")
SCALED, SKEWED = DenseColumn(standardize=True), DenseColumn(standardize=True, log=True)


@pytest.mark.parametrize(
    ("name", "values", "dtype", "kind", "options"),
    [
        ("user_id", [1, 2, 3] * 100, None, "categorical", PLAIN),
        ("", RANGE, None, "left out", None),
        *(("itemId", RANGE, None, "key", None), ("x", [f"k{k}" for k in RANGE], None, "key", None)),
        *(("x", RANGE, None, "dense", SCALED), ("x", [k**4 for k in RANGE], None, "dense", SCALED)),
        *(("x", [2**k for k in range(60)] * 5, None, "dense", SKEWED),),
        *(("x", [*range(15)] * 20, None, "categorical", PLAIN),),
        *(("x", [*range(25)] * 12, None, "dense", SCALED), ("x", [5] * N, None, "left out", None)),
        *(("x", [True, False] * 150, None, "categorical", PLAIN),),
        *(("x", ["a", None, "b"] * 100, None, "categorical", PLAIN),),
        *(("x", ["a", "b"] * 150, pl.Categorical, "categorical", PLAIN),),
        *(("x", [None, float("nan")] * 150, None, "left out", None),),
        *(("x", [*RANGE[1:], float("inf")], pl.Float64, "dense", SCALED),),
        *(("x", [date(2020, 1, 1), None] * 150, None, "left out", None),),
        *(("x", [timedelta(1), None] * 150, None, "left out", None),),
        *(("x", [{"a": k} for k in RANGE], None, "left out", None),),
        ("x", [[{"a": 1}]] * N, None, "left out", None),
        ("x", [[0.5]] * N, None, "left out", None),
        ("x", [[1] * (k % 5) for k in RANGE], None, "categorical", CategoricalColumn(longest=4)),
        ("x", [[1] * k for k in RANGE], None, "categorical", CategoricalColumn(longest=100)),
        ("x", [f"{k % 5}|{k % 6}" for k in RANGE], None, "categorical", PAIRS),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_what_a_column_is(
    tmp_path: Path, name: str, values: Any, dtype: Any, kind: str, options: Any, ending: str
) -> None:
    frame = pl.DataFrame({"y": [0, 1] * 150, name: pl.Series(name, values, dtype=dtype)})
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        frame.write_parquet(path)
    elif frame[name].dtype.is_nested() or frame[name].dtype.is_temporal():
        return
    else:
        frame.write_csv(path)
    label, report = inspect([path])
    assert (label.name, label.kind) == ("y", "label")
    assert (report.name, report.kind, report.options) == (name, kind, options)


def dlrm_data(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dlrm-data", *words])
    try:
        data.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("make", [click_log, wide_log])
def test_the_proposed_schema_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], make: Any
) -> None:
    log = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*-*"))
    assert dlrm_data(monkeypatch, "inspect", *files) == 0
    schema = read_schema("schema.yaml")
    assert schema == proposed_schema(inspect([Path(file) for file in files]))
    assert schema.label == log.schema["label"]
    command = capsys.readouterr().out.splitlines()[-1].split("'")[1]
    assert OverridesParser.create().parse_override(command).value() == files
    assert dlrm_data(monkeypatch, "inspect", *files) == 2, "the yaml is kept"
    assert dlrm_data(monkeypatch, "convert", *files, "schema=schema.yaml", "val_share=0.2") == 0
    assert "600 samples" in capsys.readouterr().out
    log.schema.clear()
    log.schema.update(schema.to_json())
    check_dataset(
        lambda: dataset(
            log,
            tmp_path,
            blocks_dir=next(Path("schema.blocks").iterdir()),
            val_share=0.2,
            block_rows=2048,
        ),
        world_sizes=(1, 2),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((["what"], "neither inspect nor convert"), (["inspect"], "name")),
        *((["inspect", "none"], "is no file"), (["inspect", "no.csv"], "no rows")),
        *((["inspect", "a.csv", *more], message) for *more, message in (
            ("label=l", "has no column l"), ("label=s", "must be 0 or 1"),
            ("b.csv", "do not both have"))),
        *((["inspect", "b.csv"], "label=COLUMN"), (["inspect", "n.csv"], "no column seems")),
        *((["convert", "a.csv"], "name the schema"), (["convert", "a.csv", "schema=."], "")),
        (["convert", "a.csv", "schema=no.yaml"], "does not exist"),
        *((["convert", "a.csv", "schema=s.yaml", f"{key}={value}"], key) for key, value in (
            ("val_share", "2"), ("val_share", "x"), ("block_rows", "0"),
            ("max_malformed_share", "-1"), ("validation_files", "5"), ("what", "1"))),
        (["convert", "a.csv", "schema=s.yaml", "validation_files=a.csv"], "no file that is not in"),
        (["convert", "a.csv", "schema=s.yaml", "out=."], "not empty"),
    ],
)  # fmt: skip
def test_says_what_cannot_be_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("y,s\n" + "0,a\n1,b\n" * 30)
    Path("b.csv").write_text("s,t\n0,a\n")
    Path("n.csv").write_text("y,t\n0,0.5\n1,1.5\n")
    Path("no.csv").write_text("y,t\n")
    Path("s.yaml").write_text("{label: y, categorical: {s: {}}}")
    before = set(tmp_path.iterdir())
    assert dlrm_data(monkeypatch, *words) == 2
    assert message in capfd.readouterr().err
    assert set(tmp_path.iterdir()) == before


def test_a_label_of_lists_is_none(tmp_path: Path) -> None:
    pl.DataFrame({"y": [[1]] * 9, "s": ["a", "b", "c"] * 3}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"the label y is \[.* in some rows"):
        inspect([tmp_path / "a.parquet"], "y")


def test_the_separator_of_a_text_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("y;user;price\n" + "1;a;2,5\n0;b;3,5\n" * 30)
    with pytest.raises(DataError, match="give separator=';'"):
        inspect([path])
    reports = inspect([path], separator=";")
    assert [report.name for report in reports] == ["y", "user", "price"]
    assert proposed_schema(reports, ";").separator == ";"


@pytest.mark.parametrize("other", [2, "True"])
def test_labels_are_zero_and_one(tmp_path: Path, other: object) -> None:
    labels = [type(other)(1), other] * 9
    pl.DataFrame({"y": labels, "s": ["a", "b"] * 9}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=f"the label y is {other} in some rows"):
        inspect([tmp_path / "a.parquet"], label="y")
