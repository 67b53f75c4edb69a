"""Reads and writes files of one JSON object, and writes any file completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_sharded.errors import ConfigError


def read_json_object(path: str | Path, *, noun: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ConfigError: the file is missing or holds something else; the message calls it `what`.
    """
    try:
        fields = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the {noun} file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the {noun} file {path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"the {noun} file {path} holds a {type(fields).__name__}, not an object")
    return fields


def write_json(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Write a JSON file completely or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        replace_file(path, (json.dumps(fields, indent=1) + "\n").encode())
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
