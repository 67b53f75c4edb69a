"""The one reader of JSON forms: values that anyone may have written become dataclasses.

A dataclass is the form of an object. Its fields are the keys, their annotations say what the values
are, fields with a default may be missing, and `__post_init__` checks what else must hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dlrm_sharded.files.errors import DataError, UserError

T = TypeVar("T")

Number = int | float
"""A number that stays an integer if it is written as one, so that it is written so again."""

NOT_IN_JSON = {"in_json": False}
"""Metadata of fields that no file has."""


def make_plain(value: Any) -> None:
    """Turn scalars of NumPy in a frozen value into numbers, as JSON has, and lists into tuples."""
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if not isinstance(found, int | float) and getattr(found, "ndim", None) == 0:
            object.__setattr__(value, field.name, found.item())
        if isinstance(found, list):  # as a yaml gives them, which would equal no tuple
            object.__setattr__(value, field.name, tuple(found))


def read_form(
    raw: object,
    form: type[T],
    *,
    name: str,
    error: type[UserError] = DataError,
    may_have_others: bool = False,
) -> T:
    """Return the value of a form that JSON describes.

    Args:
        name: what holds the JSON, at the beginning of the message, such as the path of a file.
        error: type of the error.
        may_have_others: whether objects may have keys that their forms do not have.

    Raises:
        UserError: the JSON has another form; the message says where in it, and what is there.
    """
    import msgspec  # takes a while to load, and commands that read nothing do without

    try:
        found = msgspec.convert(raw, form)
        if not may_have_others:
            _check_keys(raw, found, "$")
    except (msgspec.ValidationError, RecursionError) as problem:
        raise error(f"{name}: {problem}") from problem
    return found


def form_of(value: Any) -> dict[str, Any]:
    """Return the form that `read_form` reads; fields that have their default are left out.

    A tuple becomes a list.
    """
    fields = [f for f in dataclasses.fields(value) if f.metadata.get("in_json", True)]
    found = {f.name: getattr(value, f.name) for f in fields}
    return {f.name: _as_list(found[f.name]) for f in fields if found[f.name] != f.default}


def _as_list(value: Any) -> Any:
    return [_as_list(item) for item in value] if isinstance(value, tuple) else value


def _check_keys(raw: object, found: Any, place: str) -> None:
    """Raise ValidationError if an object in `raw` has a key that its form in `found` lacks."""
    if isinstance(raw, Mapping):
        inside = found
        if dataclasses.is_dataclass(found):
            fields = dataclasses.fields(found)
            known = [field.name for field in fields if field.metadata.get("in_json", True)]
            if unknown := [key for key in raw if key not in known]:
                import msgspec

                raise msgspec.ValidationError(
                    f"Object contains unknown field `{unknown[0]}` - at `{place}`; known: "
                    f"{', '.join(known)}"
                )
            inside = {key: getattr(found, key) for key in known}
        for key, value in raw.items():
            _check_keys(value, inside[key], f"{place}.{key}")
    elif isinstance(raw, Sequence) and raw and isinstance(raw[0], Mapping | list):
        for i, (value, read) in enumerate(zip(raw, found, strict=True)):
            _check_keys(value, read, f"{place}[{i}]")
