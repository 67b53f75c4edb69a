"""The reader of JSON forms: converts untrusted JSON values to dataclasses.

A dataclass is the form of an object. Its fields are the keys, annotations give the types of values,
fields with a default may be missing, and `__post_init__` checks any other condition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dlrm_sharded.files.errors import DataError, UserError

T = TypeVar("T")

Number = int | float
"""A number that stays an integer if it is written as one, so that it is written back unchanged."""

NOT_IN_JSON = {"in_json": False}
"""Metadata of fields that are not in files."""


def make_plain(value: Any) -> None:
    """Convert NumPy scalars in a frozen dataclass to Python numbers, and lists to tuples."""
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        if not isinstance(found, int | float) and getattr(found, "ndim", None) == 0:
            object.__setattr__(value, field.name, found.item())
        if isinstance(found, list):  # from a yaml; a list never equals a tuple
            object.__setattr__(value, field.name, tuple(found))


def read_form(
    raw: object,
    form: type[T],
    *,
    name: str,
    error: type[UserError] = DataError,
    may_have_others: bool = False,
) -> T:
    """Convert JSON to its form, and return the value.

    Args:
        name: source of the JSON, such as the path of a file, with which messages begin.
        error: type of the error to raise.
        may_have_others: whether objects may have keys that are not in their forms.

    Raises:
        UserError: the JSON does not fit the form; the message says where, and what is there.
    """
    import msgspec  # slow to load, and commands that read nothing do not need it

    try:
        found = msgspec.convert(raw, form)
        if not may_have_others:
            _check_keys(raw, found, "$")
    except (msgspec.ValidationError, RecursionError) as problem:
        raise error(f"{name}: {problem}") from problem
    return found


def form_of(value: Any) -> dict[str, Any]:
    """Return a value as JSON for `read_form`; fields with their default value are left out.

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
