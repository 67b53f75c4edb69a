"""Strategies of hypothesis that change valid input: JSON by its structure, files by their bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

ODD_NUMBERS = (
    *(-1, 0, 1, 2, 3, 5, 7, 64, 2**31 - 1, 2**31, 2**40, 2**60, 2**62, 2**63, 2**64, 10**30),
    *(-0.0, 0.5, 1.5, 1e-300, 1e-9, 1e30, 1e300, float("nan"), float("inf"), float("-inf")),
)
"""Numbers at limits. There are none that a machine could allocate, but only slowly."""

ODD_TEXTS = ("", " ", "a", "5", "1e9", "null", "../../x", "a\x00b", "\ud7ff", "é", "x" * 5000)

SCALARS = st.one_of(
    st.none(), st.booleans(), st.sampled_from(ODD_NUMBERS), st.sampled_from(ODD_TEXTS)
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.sampled_from(["a", "name", "table"]), SCALARS, max_size=2),
)
"""Values of JSON that nobody expects at a place."""

Path = tuple[str | int, ...]


def paths(value: Any, prefix: Path = ()) -> list[Path]:
    """Return the places of all values inside a JSON value."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    found = [(*prefix, key) for key, _ in items]
    return found + [path for key, child in items for path in paths(child, (*prefix, key))]


@st.composite
def changed_json(draw: Callable[[st.SearchStrategy[Any]], Any], base: Any) -> Any:
    """Draw a JSON value in which up to three places were replaced, removed, repeated or added."""
    value = copy.deepcopy(base)
    for _ in range(draw(st.integers(0, 3))):
        places = paths(value)
        if not places:
            break
        *parents, last = draw(st.sampled_from(places))
        parent = value
        for key in parents:
            parent = parent[key]
        change = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if change == "remove":
            del parent[last]
        elif change == "replace":
            parent[last] = draw(VALUES)
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        else:
            parent[draw(st.sampled_from(["more", "", "rank", "rows"]))] = draw(VALUES)
    return value


@st.composite
def damaged(draw: Callable[[st.SearchStrategy[Any]], Any], base: bytes) -> bytes:
    """Draw the bytes of a file of which a part was cut, flipped, zeroed, repeated or inserted."""
    start = draw(st.integers(0, max(0, len(base) - 1)))
    stop = min(len(base), start + draw(st.sampled_from([1, 2, 8, 64, 4096])))
    before, part, after = base[:start], base[start:stop], base[stop:]
    change = draw(st.sampled_from(["cut", "flip", "zero", "ones", "repeat", "remove", "insert"]))
    if change == "cut":
        return before
    if change == "flip":
        bit = 1 << draw(st.integers(0, 7))
        return before + bytes([*(byte ^ bit for byte in part[:1]), *part[1:]]) + after
    replacement: dict[str, bytes] = {
        "zero": bytes(len(part)),
        "ones": b"\xff" * len(part),
        "repeat": part + part,
        "remove": b"",
        "insert": draw(st.binary(min_size=1, max_size=8)) + part,
    }
    return before + replacement[change] + after
