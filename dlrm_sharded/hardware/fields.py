"""Reads small frozen dataclasses from JSON that anyone may have written."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def read_fields(cls: type[T], raw: Any) -> T:
    """Build a dataclass of texts, positive numbers, lists of texts, other dataclasses, or None.

    Fields that the class does not have are ignored; missing ones are unknown (None).

    Raises:
        ValueError: a field has another type or is no positive finite number.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{cls.__name__} is {raw!r}, must be an object")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: _value(name, hints[name], raw.get(name)) for name in names})


def _value(name: str, hint: Any, raw: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if raw is None and types.NoneType in kinds:
        return None
    if isinstance(kinds[0], type) and dataclasses.is_dataclass(kinds[0]):
        return read_fields(kinds[0], raw)
    if typing.get_origin(kinds[0]) is tuple:
        if isinstance(raw, list | tuple) and all(isinstance(text, str) for text in raw):
            return tuple(raw)
    elif kinds[0] is str:
        if isinstance(raw, str):
            return raw
    elif isinstance(raw, int | float) and not isinstance(raw, bool) and 0 < raw < math.inf:
        return kinds[0](raw)
    raise ValueError(f"{name} is {raw!r}")
