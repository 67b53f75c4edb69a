"""The file of the measurements of a simulation, to which each is appended when it is done.

The folder has `settings.json`, which says whose simulation it is, and `measurements.jsonl`. The
key of a measurement is a digest of the settings and of what was measured, so a line is never taken
for that of another simulation.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dlrm_sharded.files.errors import ConfigError, check_path
from dlrm_sharded.files.json_files import read_json_object, replace_file, write_json

SETTINGS, MEASUREMENTS, LOCK = "settings.json", "measurements.jsonl", ".lock"
KIND = "dlrm_sharded simulation"

log = logging.getLogger(__name__)


class Store:
    """The measurements in a folder, which is locked until `close` or the end of the process.

    Args:
        settings: all that measurements depend on besides the shards of a rank; JSON.

    Raises:
        ConfigError: the folder cannot be written, has other files, is in use by another process,
            or belongs to a simulation with other settings.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        check_path("out", folder)
        self.folder = Path(folder)
        self._settings = json.loads(json.dumps(settings))
        self._prepare_folder()
        self._lock = self._locked()
        try:
            self._check_settings()
        except BaseException:
            self.close()
            raise
        self._path = self.folder / MEASUREMENTS
        self._known = self._read()

    def __len__(self) -> int:
        return len(self._known)

    def key(self, *parts: Any) -> str:
        """Return the key of a measurement: of the settings and of what was measured."""
        text = json.dumps([self._settings, *parts], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the values of a measurement; None if it has not been made."""
        return self._known.get(key)

    def put(self, key: str, values: Mapping[str, Any]) -> None:
        """Append the values of a measurement to the file."""
        self._known[key] = dict(values)
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "values": values}, allow_nan=False) + "\n")

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def _prepare_folder(self) -> None:
        """Make the folder; refuse one that is not of a simulation."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in self.folder.iterdir()}
        except OSError as error:
            raise ConfigError(f"out is {self.folder}: {error.strerror}") from error
        if names and not names & {SETTINGS, MEASUREMENTS, LOCK}:
            raise ConfigError(
                f"out is {self.folder}, a folder with other files; name a new or empty folder, or "
                "that of this simulation"
            )
        if not os.access(self.folder, os.W_OK):
            raise ConfigError(f"out is {self.folder}, which cannot be written")

    def _locked(self) -> FileLock:
        lock = FileLock(self.folder / LOCK)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise ConfigError(
                f"another process simulates in out = {self.folder}; wait for it, or name another "
                "folder"
            ) from error
        except OSError as error:
            raise ConfigError(f"out is {self.folder}: {error.strerror}") from error
        return lock

    def _check_settings(self) -> None:
        """Refuse the folder of a simulation with other settings; write those of a new one."""
        path = self.folder / SETTINGS
        if path.exists():
            try:
                before = read_json_object(path, noun="settings")
            except ConfigError as error:
                log.warning("%s; it is written anew", error)
                before = {}
            if before and before.get("kind") != KIND:
                raise ConfigError(
                    f"out is {self.folder}, whose {SETTINGS} is not of a simulation; name another "
                    "folder"
                )
            differing = [
                key for key in self._settings if before and self._settings[key] != before.get(key)
            ]
            if differing:
                changes = "; ".join(
                    f"{key}: {_short(before.get(key))}, now {_short(self._settings[key])}"
                    for key in differing
                )
                raise ConfigError(
                    f"out is {self.folder}, which has a simulation with other settings "
                    f"({changes}); name another folder, or remove this one"
                )
        write_json(path, {"kind": KIND, **self._settings})

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the measurements by key; warn once of lines that are damaged, and remove them."""
        if not self._path.exists():
            return {}
        found, kept, damaged = {}, [], 0
        for line in self._path.read_bytes().splitlines():
            try:
                fields = json.loads(line)
                key, values = fields["key"], fields["values"]
                if not isinstance(key, str) or not isinstance(values, dict):
                    raise TypeError
            except (ValueError, LookupError, TypeError, RecursionError):
                damaged += 1
                continue
            found[key] = values
            kept.append(line + b"\n")
        if damaged:
            log.warning(
                "%s has %d damaged lines; what they measured is measured again", self._path, damaged
            )
            replace_file(self._path, b"".join(kept))
        return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
