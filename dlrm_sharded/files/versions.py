"""The installed versions of packages, read without loading them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def readable_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed and whose metadata give a version."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except (PackageNotFoundError, OSError, ValueError, KeyError):
            continue  # without a version, metadata gives None or a KeyError, by version of Python
    return {package: text for package, text in found.items() if text}
