"""A schema is what its yaml says, and says what it cannot be."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.datasets.schema import read_schema, schema_yaml
from dlrm_sharded.files.errors import ConfigError, DataError

GOOD: dict[str, Any] = {"label": "y", "dense": {"a": None}, "categorical": {"b": None}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({"categorical": {}}, "names no column"), ({"label": "a"}, "'a' is named twice")),
        *(({"dense": {"b": None}}, "'b' is named twice"), ({"what": 1}, "known: label, dense")),
        *(({"columns": ["y", "a"]}, r"lacks \['b'\]"), ({"columns": ["y", "y"]}, "twice")),
        ({"dense": {"a": {"clip": [2, 1]}}}, r"dense\.a\.clip is \[2\.0, 1\.0\]"),
        ({"dense": {"a": {"fill": float("inf")}}}, "fill"),
        *(({"separator": one}, "one ASCII character") for one in ("||", "é", "\n", "\r", '"')),
        ({"categorical": {"b": {"split": "|"}}}, r"categorical\.b has split, but not longest"),
        *(({"categorical": {"b": {"ids": ids}}}, "needs rows") for ids in ("hash", "as_is")),
        ({"categorical": {"b": {"ids": "hash", "rows": 9, "min_count": 2}}}, "only a vocabulary"),
        ({"categorical": {"b": {"ids": "what"}}}, "what"),
        ({"categorical": {"b": {"rows": 1}}}, "rows is 1; it must be 2 to"),
        ({"categorical": {"b": {"ids": "hash", "rows": 1}}}, "rows is 1; it must be 2 to"),
        ({"categorical": {"b": {"rows": 2**31}}}, "rows is 2,147,483,648; it must be"),
        *(({"dim": 6}, "multiple of 4"), ({"categorical": {"b": {"dim": 5}}}, "'b' has dim 5")),
        *(({"categorical": {"b": 5}}, "categorical"), ({"categorical": {1: {}}}, "categorical")),
        ({"categorical": {"b": {"rows": 9}, "c": {"table": "b", "rows": 8}}}, "values of rows"),
    ],
)
def test_says_what_cannot_be_used(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_schema(GOOD | changes)


@pytest.mark.parametrize("text", ["a: [", "", "5", "\x00"])
def test_says_which_yaml_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        read_schema(tmp_path / "bad.yaml")
    with pytest.raises(DataError, match="dlrm-data inspect"):
        read_schema(tmp_path / "none.yaml")


def test_columns_of_a_table_share_its_options() -> None:
    lists = {"table": "b", "longest": 3}
    schema = read_schema(GOOD | {"categorical": {"l": lists, "b": {"rows": 9}, "c": {"dim": 8}}})
    assert list(schema.categorical_columns) == ["b", "c", "l"], "lists are the last ones"
    shared, other = schema.tables().values()
    assert (shared.name, shared.columns, shared.rows, shared.dim) == ("b", ("b", "l"), 9, 16)
    assert (other.name, other.min_count, other.dim) == ("c", 2, 8)


def test_widths_do_not_decide_the_converted_data() -> None:
    converted = read_schema(GOOD).of_conversion()
    assert (
        read_schema(GOOD | {"dim": 64, "categorical": {"b": {"dim": 8}}}).of_conversion()
        == converted
    )
    assert read_schema(GOOD | {"min_count": 5}).of_conversion() != converted


def test_yaml_reads_back(tmp_path: Path) -> None:
    names = [
        "null",
        "1",
        "a: b",
        "# x",
        "yes",
        "é, ö",
        "~",
        "- a",
        "'q\"",
        "{x}",
        "a\nb",
        " ",
        "x" * 900,
    ]
    schema = read_schema(
        GOOD | {"label": "no", "key": ["on"], "categorical": {name: {"rows": 9} for name in names}}
    )
    (tmp_path / "schema.yaml").write_text(schema_yaml(schema, dict.fromkeys(names, "why: # 'x'")))
    assert read_schema(tmp_path / "schema.yaml").to_json() == schema.to_json()
