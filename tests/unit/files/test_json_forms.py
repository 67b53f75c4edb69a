"""Forms are read whole, and messages say where something else stands."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import pytest

from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.json_forms import NOT_IN_JSON, Number, read_form
from dlrm_sharded.files.limited import Count, Finite, PositiveFloat, Text


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    name: Text
    size: Count = 0
    factor: Number = 1
    secret: str = dataclasses.field(default="none", metadata=NOT_IN_JSON)

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ConfigError("the name is bad")


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    parts: tuple[Part, ...]
    by_name: Mapping[str, Part] = dataclasses.field(default_factory=dict)
    ms: PositiveFloat | None = None
    share: Finite = 0.0


def test_a_form_is_read_with_its_defaults():
    fields = {"parts": [{"name": "a", "factor": 2}], "by_name": {"b": {"name": "b"}}, "ms": 3}
    found = read_form(fields, Whole, name="x")
    assert found == Whole((Part("a", 0, 2),), {"b": Part("b")}, 3.0)
    assert (type(found.parts[0].factor), type(found.ms)) == (int, float)


WRONG: dict[str, tuple[Any, str]] = {
    "no_object": (3, "x.json: Expected `object`, got `int`"),
    "missing": ({}, "x.json: Object missing required field `parts`"),
    "type": ({"parts": [{"name": 3}]}, "Expected `str`, got `int` - at `$.parts[0].name`"),
    "true": ({"parts": [{"name": "a", "size": True}]}, "got `bool` - at `$.parts[0].size`"),
    "negative": ({"parts": [{"name": "a", "size": -1}]}, "`int` >= 0 - at `$.parts[0].size`"),
    "huge": ({"parts": [{"name": "a", "size": 2**63}]}, "at `$.parts[0].size`"),
    "no_text": ({"parts": [{"name": ""}]}, "length >= 1 - at `$.parts[0].name`"),
    "zero": ({"parts": [], "ms": 0}, "`float` > 0.0 - at `$.ms`"),
    "infinite": ({"parts": [], "ms": float("inf")}, "at `$.ms`"),
    "nan": ({"parts": [], "share": float("nan")}, "at `$.share`"),
    "more_than_a_float": ({"parts": [], "share": 10**400}, "out of range - at `$.share`"),
    "check": ({"parts": [{"name": "bad"}]}, "x.json: the name is bad - at `$.parts[0]`"),
    "unknown": ({"parts": [], "a": 1}, "unknown field `a` - at `$`; known: parts, by_name, ms"),
    "unknown_inside": (
        {"parts": [{"name": "a"}, {"name": "b", "nmae": 1}]},
        "unknown field `nmae` - at `$.parts[1]`; known: name, size, factor",
    ),
    "unknown_by_name": (
        {"parts": [], "by_name": {"b": {"name": "b", "x": 1}}},
        "unknown field `x` - at `$.by_name.b`",
    ),
    "not_in_json": ({"parts": [{"name": "a", "secret": "x"}]}, "unknown field `secret` - at"),
}


@pytest.mark.parametrize(("raw", "message"), WRONG.values(), ids=WRONG)
def test_another_form_is_refused_with_its_place(raw, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read_form(raw, Whole, name="x.json")


def test_the_caller_chooses_the_error_and_whether_there_may_be_more():
    with pytest.raises(ConfigError, match="unknown field"):
        read_form({"parts": [], "a": 1}, Whole, name="x", error=ConfigError)
    assert read_form({"parts": [], "a": 1}, Whole, name="x", may_have_others=True) == Whole(())
