"""The folder in which commands keep what they learn about a machine for later commands."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

CACHE_VARIABLE = "DLRM_SHARDED_CACHE"
"""Environment variable that names the folder."""


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder, which may not exist or not be writable.

    It is `$DLRM_SHARDED_CACHE`, or else `dlrm_sharded` in `$XDG_CACHE_HOME`, or else in `~/.cache`.
    A user without a home folder gets a folder among the temporary files.
    """
    if named := environment.get(CACHE_VARIABLE):
        return Path(named)
    if caches := environment.get("XDG_CACHE_HOME"):
        return Path(caches) / "dlrm_sharded"
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111  raises no error
    if os.path.isabs(home):  # noqa: PTH117
        return Path(home) / ".cache" / "dlrm_sharded"
    return Path(tempfile.gettempdir()) / f"dlrm_sharded-{os.getuid()}"


def journal_folder(journal: str) -> Path:
    """Return the folder of journals for a config's `journal`; "auto" is a folder in the cache."""
    return user_cache() / "runs" if journal == "auto" else Path(journal)
