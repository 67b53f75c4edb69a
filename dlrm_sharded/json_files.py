"""Reads and writes files of one JSON object, and writes any file completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_sharded.errors import ConfigError, check_path


def read_json_object(path: str | Path, *, noun: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ConfigError: the file is missing, has a key twice, or holds something else; the message
            calls it a `noun` file.
    """
    check_path(f"the path of the {noun} file", path)
    try:
        # Editors of Windows put a byte order mark before UTF-8.
        text = Path(path).read_text(encoding="utf-8-sig")
        fields = json.loads(text, object_pairs_hook=_without_repetition)
    except OSError as error:
        raise ConfigError(f"cannot read the {noun} file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the {noun} file {path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"the {noun} file {path} holds a {type(fields).__name__}, not an object")
    return fields


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of some keys and values; ValueError if a key is there twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there {keys.count(twice)} times in one object")
    return fields


def write_json(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Write a JSON file completely or not at all; ValueError for NaN, which JSON does not have.

    Raises:
        ConfigError: the file cannot be written.
    """
    check_path("the path of the file to write", path)
    try:
        replace_file(path, (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def replace_file(path: str | Path, data: bytes) -> None:
    """Write a file completely or not at all; readers see the old content until it is complete.

    Raises:
        OSError: the file cannot be written; its old content is kept.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
