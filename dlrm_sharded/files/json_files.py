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

STANDARD_OUTPUT = "-"
MAX_LINKS = 40
"""Largest number of links that Linux follows to a file."""

MAX_BYTES = 2**30
"""Largest file that is read as a whole; this package's files are far smaller."""


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


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these keys and values; raise ValueError if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(key, count)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shortened(key)} is there {count} times in one object")
    return fields


def read_file(path: str | Path) -> bytes:
    """Return the content of a regular file, or of a file that this process has open.

    Raises:
        OSError: it is another kind of file, exceeds `MAX_BYTES`, or cannot be read.
    """
    if _open_file(Path(path)) is not None:  # such as /dev/stdin, or a pipe of a shell's <(...)
        return Path(path).read_bytes()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_BYTES:
            reason = f"it has {size:,} B, of which at most {MAX_BYTES:,} B are read"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read()


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading: a pipe could block forever, and a device may have no end.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # open() refuses a folder
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


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
    link stays a link: the file that it points to is replaced. A device or a pipe has no old content
    to keep and is written directly, as are "-", which is standard output, and open files such as
    /dev/stdout.

    Raises:
        OSError: the file cannot be written; its old content is kept.
    """
    if is_written_through(path):
        with _opened(path) as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    old = _stat(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    # Users who may not read the old file may not read the partial one either.
    mode = 0o666 if old is None else stat.S_IMODE(old.st_mode)
    try:
        partial.unlink(missing_ok=True)  # left by a killed process with the same pid
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            if old is not None:
                with contextlib.suppress(OSError):  # only root may give files away
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                with contextlib.suppress(OSError):
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
    if str(path).endswith(os.sep):
        raise ConfigError(f"{key} is {str(path)!r}: it is a folder; name a file")
    try:
        is_stream = is_written_through(path)
        folder = Path(os.path.realpath(path)).parent
        has_folder = is_stream or not may_be_stream or folder.is_dir()
    except OSError as error:
        raise ConfigError(f"{key} is {str(path)!r}: {error.strerror}") from error
    if is_stream and not may_be_stream:
        raise ConfigError(f"{key} is {str(path)!r}, but more than one file is written; name a file")
    if not has_folder:
        raise ConfigError(f"{key} is {str(path)!r}, but there is no folder {folder}; make it first")


def folder_to_write(key: str, path: object) -> Path:
    """Return the path of a folder, which may exist; raise ConfigError if it cannot be made."""
    check_path(key, path)
    assert isinstance(path, str | Path)
    if path == STANDARD_OUTPUT:
        raise ConfigError(
            f"{key} is '-', standard output, but more than one file is written; name a folder"
        )
    folder = Path(path)
    try:
        nearest = next(parent for parent in (folder, *folder.parents) if _stat(parent) is not None)
    except OSError as error:
        raise ConfigError(f"{key} is {str(path)!r}: {error.strerror}") from error
    if not nearest.is_dir():
        raise ConfigError(
            f"{key} is {str(path)!r}, but {nearest} is not a folder; name another one"
        )
    return folder


def is_written_through(path: str | Path) -> bool:
    """Return whether a path names a byte stream, which is written without replacing anything.

    Raises:
        OSError: it can be neither replaced nor written.
    """
    if path == STANDARD_OUTPUT or _open_file(Path(path)) is not None:
        return True
    found = _stat(Path(path))
    if found is None or stat.S_ISREG(found.st_mode):
        return False
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file", str(path))
    if stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode):
        return True
    kind = "socket" if stat.S_ISSOCK(found.st_mode) else "block device"
    raise OSError(errno.EINVAL, f"it is a {kind}; name a file", str(path))


def _stat(path: Path) -> os.stat_result | None:
    """Return the status of a path's target; None if it does not exist."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _open_file(path: Path) -> int | None:
    """Return the file descriptor of this process that a path such as /dev/stdout names, or None.

    Opening such a path again would truncate a file to which a shell's >> appends.
    """
    for _ in range(MAX_LINKS):
        if os.path.realpath(path.parent) == f"/proc/{os.getpid()}/fd" and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    return None


def _opened(path: str | Path) -> IO[bytes]:
    """Open a byte stream for writing, without waiting for a reader."""
    number = 1 if path == STANDARD_OUTPUT else _open_file(Path(path))
    if number == 1:
        if sys.stdout is None:  # the descriptor is closed, or another file has it
            raise OSError(errno.EBADF, "standard output is closed", str(path))
        sys.stdout.flush()  # what was printed before comes first
    if number is not None:
        return os.fdopen(os.dup(number), "wb")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "nobody reads this pipe", str(path)) from error
        raise
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "wb")
