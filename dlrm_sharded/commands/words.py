"""Reads the command line of commands without a config: `dlrm-report runs out=comparison`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from dlrm_sharded.files.errors import ConfigError

NOUNS = {int: "an integer", float: "a number"}

Keys = Mapping[str, tuple[Callable[[str], object], object]]
"""The parser of a key's text, and the value of a key that is not there, by the key."""


def read_words(
    usage: str | None,
    keys: Keys,
    *,
    names: str | None = None,
    arguments: Sequence[str] | None = None,
) -> SimpleNamespace:
    """Return the values of all keys, and the words that are no `key=value` as `names`.

    Args:
        usage: what --help prints.
        names: what the other words name; None if there are none.
        arguments: None for those of the command line.

    Raises:
        ConfigError: a word or a value cannot be used, or a name is missing.
    """
    found: dict[str, Any] = {key: default for key, (_, default) in keys.items()}
    words, seen = [], set()
    for word in sys.argv[1:] if arguments is None else arguments:
        key, sign, text = word.partition("=")
        if word in ("-h", "--help"):
            print(usage)
            raise SystemExit(0)
        if word.startswith("--"):
            raise ConfigError(f"{key} is no flag; write {_key(key)}={text or 'VALUE'}")
        if not sign or not key.isidentifier():
            words.append(word)
            continue
        if key not in keys:
            known = ", ".join(keys) or "none"
            raise ConfigError(f"{word}: there is no key {key!r}; known: {known}; or write ./{word}")
        if key in seen:
            raise ConfigError(f"{key} is there twice, as in {word}; write it once")
        seen.add(key)
        if text != "null":
            found[key] = _value(key, text, keys[key][0])
    for word in words:
        if names is None:
            known = ", ".join(keys) or "none"
            raise ConfigError(f"{word!r} has no effect here; known: {known}")
    if names is not None and not words:
        raise ConfigError(f"name {names}; --help shows how")
    return SimpleNamespace(names=words, **found)


def split_list(text: str) -> list[str]:
    """Return the parts of `a,b` or `[a,b]`; commas within brackets do not separate."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    stripped = (part.strip().strip("'\"") for part in parts)
    return [part for part in stripped if part]


def checked_names(key: str, names: object, *, example: str) -> list[str]:
    """Return a list of different names; ConfigError if it is none, or has one twice."""
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{key} is {names!r}, must be a name or a list of names: {example}")
    if len(set(names)) < len(names):
        raise ConfigError(f"{key} names {max(names, key=names.count)!r} twice; name each once")
    return names


def _key(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _value(key: str, text: str, parse: Callable[[str], object]) -> object:
    try:
        return parse(text)
    except ValueError as error:
        noun = NOUNS.get(parse) if isinstance(parse, type) else None
        raise ConfigError(f"{key} is {text!r}, must be {noun or error}") from error
