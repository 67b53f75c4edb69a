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
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dlrm_sharded.files.errors import ConfigError, DataError
from dlrm_sharded.files.json_files import read_json_object, write_json
from dlrm_sharded.files.line_file import LineFile, changed_settings, locked

SETTINGS, MEASUREMENTS, LOCK = "settings.json", "measurements.jsonl", ".lock"
KIND = "dlrm_sharded simulation"

log = logging.getLogger(__name__)


class Measurement(Protocol):
    """Something that was measured."""

    def to_json(self) -> dict[str, Any]:
        """Return the values of its line in the file."""


M = TypeVar("M", bound=Measurement)


def folder_of(out: Path, sharder: str) -> Path:
    """Return the folder of a sharder's files."""
    return out / re.sub(r"[^\w.=-]+", "_", sharder)


class Store:
    """The measurements in a folder, which is locked until `close` or the end of the process.

    Args:
        settings: all that measurements depend on besides the shards of a rank; JSON.

    Attributes:
        folder: the folder.
        settings: its settings, as JSON has them.

    Raises:
        ConfigError: the folder cannot be written, has other files, is in use by another process,
            or belongs to a simulation with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.settings = json.loads(json.dumps(settings))
        self._prepare_folder()
        self._lock = locked(
            self.folder / LOCK,
            refusal=f"another process simulates in out = {self.folder}; wait for it, or name "
            "another folder",
        )
        self._file = LineFile(self.folder / MEASUREMENTS, "measurement")
        try:
            self._check_settings()
            self._known = dict(self._file.read(_measurement).values())
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._known)

    def kept(
        self,
        noun: str,
        parts: Sequence[Any],
        *,
        read: Callable[[Mapping[str, Any]], M],
        measure: Callable[[], M],
    ) -> M:
        """Return a measurement of the file, or make it and append it.

        Args:
            noun: what is measured, for messages.
            parts: what was measured, as JSON; with the settings they are its key.
            read: reads the values of a line; its error says that they are damaged.
        """
        text = json.dumps([self.settings, *parts], sort_keys=True)
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        if key in self._known:
            try:
                return read(self._known[key])
            except (LookupError, ConfigError, DataError) as error:
                log.warning("%s is measured again: its times are damaged (%s)", noun, error)
        found = measure()
        self._known[key] = found.to_json()
        self._file.append({"key": key, "values": self._known[key]})
        return found

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

    def _check_settings(self) -> None:
        """Refuse the folder of a simulation with other settings; write those of a new one."""
        path, settings = self.folder / SETTINGS, {"kind": KIND, **self.settings}
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
            if before and (changes := changed_settings(before, settings)):
                raise ConfigError(
                    f"out is {self.folder}, which has a simulation with other settings "
                    f"({changes}); name another folder, or remove this one"
                )
        write_json(path, settings)


def _measurement(fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the key and the values of a line."""
    return str(fields["key"]), dict(fields["values"])
