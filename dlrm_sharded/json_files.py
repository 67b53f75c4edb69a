"""Files that hold one JSON object: read with clear errors, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm_sharded.errors import ConfigError


def read_json_object(path: str | Path, *, what: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ConfigError: the file is missing or holds something else; `what` names it.
    """
    try:
        fields = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the {what} file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the {what} file {path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"the {what} file {path} holds a {type(fields).__name__}, not an object")
    return fields


def write_json(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Write a JSON file that is either whole or not there."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(fields, indent=1) + "\n")
        partial.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
