"""Reads the command line of commands without a config: `dlrm-report runs out=comparison`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from typing import Any

import yaml

from dlrm_sharded.files.errors import ConfigError


def read_words(
    usage: str | None, keys: Collection[str] = (), *, names: str | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Return the words of the command line, and the parsed values of its `key=value` parts.

    Args:
        usage: the text that --help prints.
        names: what the words name, for messages; None if no words are allowed.

    Raises:
        ConfigError: a word cannot be used, or a name is missing.
    """
    words: list[str] = []
    values: dict[str, Any] = {}
    for word in sys.argv[1:]:
        key, sign, text = word.partition("=")
        if word in ("-h", "--help"):
            print(usage)
            raise SystemExit(0)
        if sign and key in keys:
            values[key] = value_of(text)
        elif names is None or word.startswith("-") or (sign and key.isidentifier()):
            known = ", ".join(f"{key}=" for key in keys) or "none"
            raise ConfigError(f"{word} has no effect here; keys: {known}")
        else:
            words.append(word)
    if names is not None and not words:
        raise ConfigError(f"name {names}; --help shows how")
    return words, {key: value for key, value in values.items() if value is not None}


def checked_names(key: str, given: object, *, example: str) -> list[str]:
    """Return the names in a list, or one name as a list; raise ConfigError for anything else."""
    names: list[Any] = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{key} is {given!r}; it must be a name or a list of names: {example}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{key} names {max(names, key=names.count)!r} twice; name each once")
    return names


def value_of(text: str) -> Any:
    """Read a number, true or false, a list in brackets, or null; anything else is a text."""
    with contextlib.suppress(yaml.YAMLError):  # such as for a glob, *.gz
        found = yaml.safe_load(text)
        if isinstance(found, int | float | None) or text.startswith("["):
            return found
    return text
