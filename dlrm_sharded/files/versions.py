"""The installed versions of packages, read without loading them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def readable_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages that are installed and whose metadata state one."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except (PackageNotFoundError, OSError, ValueError, KeyError):
            continue  # metadata without a version are None or a KeyError, by the version of Python
    return {package: text for package, text in found.items() if text}
