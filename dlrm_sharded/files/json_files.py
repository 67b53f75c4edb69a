"""Reads files that hold one JSON object, and writes files completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from dlrm_sharded.files.errors import ConfigError, check_path, shortened
from dlrm_sharded.files.remote_files import Location, RemotePath

STANDARD_OUTPUT = ("-", "/dev/stdout")


def read_json_object(path: str | Path, *, noun: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ConfigError: the file is missing, has a key twice, or holds anything else; the message
            calls it a `noun` file.
    """
    check_path(f"the path of the {noun} file", path)
    try:
        # Windows editors put a byte order mark before UTF-8.
        text = read_file(path).decode("utf-8-sig")
        fields = json.loads(text, object_pairs_hook=_without_repetition)
    except OSError as error:
        raise ConfigError(f"cannot read the {noun} file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the {noun} file {path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"the {noun} file {path} holds a {type(fields).__name__}, not an object")
    return fields


def read_file(path: str | Path) -> bytes:
    """Return the content of a file, or of a pipe that a shell has opened, as in `task=<(command)`.

    Raises:
        OSError: it is another pipe, which could wait forever, or a device, which may have no end.
    """
    if is_stream(path) and not os.path.realpath(path).startswith("/proc/"):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return Path(path).read_bytes()


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these keys and values; raise ValueError if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(key, count)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shortened(key)} is there {count} times in one object")
    return fields


def write_json(path: str | Path, fields: Mapping[str, Any]) -> None:
    """Write a JSON file completely or not at all; raise ValueError for NaN, which JSON lacks.

    Raises:
        ConfigError: the file cannot be written.
    """
    check_path("the path of the file to write", path)
    try:
        replace_file(path, (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def replace_file(path: str | Path, data: bytes) -> None:
    """Write a file in one piece, as `replaced_file` does.

    Raises:
        OSError: the file cannot be written; its old content is kept.
    """
    with replaced_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def replaced_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a file for writing; it appears when the block ends, completely or not at all.

    Readers see the old content until then. A new file has the permissions of the old one, and a
    link stays a link: the file that it points to is replaced. Streams are written directly.

    Raises:
        OSError: the file cannot be written; its old content is kept.
    """
    if is_stream(path):
        with _opened(path) as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    # Users who may not read the old file may not read the partial one either.
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(partial, flags, 0o666 if mode is None else mode)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                with contextlib.suppress(OSError):  # some file systems have no permissions
                    os.fchmod(descriptor, mode)  # the umask may have narrowed it
            yield file
            file.flush()
            os.fsync(descriptor)  # or a crash of the host may leave an empty file
        partial.replace(target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_durably(path: Location, content: Iterable[bytes | memoryview]) -> None:
    """Write a file into a folder that is not in use yet; on return, its content is on disk."""
    if isinstance(path, RemotePath):
        path.write_bytes(b"".join(content))
        return
    with path.open("wb") as file:
        for block in content:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write the names of a folder's files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_file_to_write(key: str, path: object, *, may_be_stream: bool = True) -> None:
    """Raise ConfigError unless a file can be written, before the work that makes its content.

    Args:
        may_be_stream: whether it may be standard output, a device or a pipe, which can take the
            content of only one file.
    """
    check_path(key, path)
    assert isinstance(path, str | Path)
    folder = Path(os.path.realpath(path)).parent
    if str(path).endswith(os.sep) or Path(path).is_dir():
        raise ConfigError(f"{key} is {str(path)!r}: it is a folder; name a file")
    if is_stream(path) and not may_be_stream:
        raise ConfigError(f"{key} is {str(path)!r}, but more than one file is written; name a file")
    if may_be_stream and not (is_stream(path) or folder.is_dir()):
        raise ConfigError(f"{key} is {str(path)!r}, but there is no folder {folder}; make it first")


def folder_to_write(key: str, path: object) -> Path:
    """Return the path of a folder, which may exist; raise ConfigError if it cannot be made."""
    check_path(key, path)
    assert isinstance(path, str | Path)
    if str(path) in STANDARD_OUTPUT:
        raise ConfigError(
            f"{key} is {str(path)!r}, standard output, but several files are written; name a folder"
        )
    folder = Path(path)
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not nearest.is_dir():
        raise ConfigError(
            f"{key} is {str(path)!r}, but {nearest} is not a folder; name another one"
        )
    return folder


def is_stream(path: str | Path) -> bool:
    """Return whether a path names standard output, a device or a pipe."""
    found = Path(path)
    is_special = found.exists() and not (found.is_file() or found.is_dir())
    return is_special or str(path) in STANDARD_OUTPUT


def _opened(path: str | Path) -> IO[bytes]:
    """Open a stream for writing."""
    if str(path) not in STANDARD_OUTPUT:
        return Path(path).open("wb")
    sys.stdout.flush()  # what was printed before comes first
    return os.fdopen(os.dup(1), "wb")
