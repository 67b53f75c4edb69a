"""Files of object stores and other remote file systems, under URLs such as s3://bucket/run.

fsspec, which torch requires, accesses them: `s3://` with the package s3fs, `gs://` with gcsfs,
`abfs://` with adlfs, and `webhdfs://` and others without another package. Requests are retried
after errors that may be transient.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dlrm_sharded.files.errors import ConfigError, RemoteFileError, check_path

log = logging.getLogger(__name__)
T = TypeVar("T")

PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Times between the attempts of a request."""

LATE_S = 10.0
"""Time after which a host sees what another host wrote to a shared disk."""

LOOK_S = 0.2
"""Time between two checks for it."""

PASSWORD = re.compile(r"://[^/@]*:[^/]*@")
"""The part of a URL with a password."""

LASTING = {
    FileNotFoundError: errno.ENOENT,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    PermissionError: errno.EACCES,
}
"""Errors that a retry does not fix, with their numbers, which file systems may leave out."""


@dataclass(frozen=True, slots=True, order=True)
class RemotePath:
    """A file or folder in a remote file system, with the methods of `Path` that are needed.

    Methods raise FileNotFoundError and similar errors as a `Path` does, and RemoteFileError for any
    other error of the file system. A folder exists as long as a file is in it.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rstrip("/").rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def exists(self) -> bool:
        return self._kind() is not None

    def is_file(self) -> bool:
        return self._kind() == "file"

    def _kind(self) -> str | None:
        try:
            # not exists() and isfile(), which return False after any error
            return str(self._request(lambda fs, path: fs.info(path)["type"]))
        except FileNotFoundError:
            return None

    def entries(self) -> dict[str, int | None]:
        """Return the sizes of the files in a folder, and None for each folder in it, by name."""
        try:
            own, found = self._request(lambda fs, path: (path, fs.ls(path, detail=True)))
        except FileNotFoundError:
            return {}
        return {
            RemotePath(entry["name"]).name: entry["size"] if entry["type"] == "file" else None
            for entry in found
            # some object stores list the folder itself as a file
            if entry["name"].rstrip("/") != own.rstrip("/")
        }

    def iterdir(self) -> Iterator[RemotePath]:
        return (self / name for name in self.entries())

    def read_bytes(self) -> bytes:
        return bytes(self._request(lambda fs, path: fs.cat_file(path)))

    def write_bytes(self, content: bytes) -> None:
        def write(fs: Any, path: str) -> None:
            if not fs.async_impl:  # it has real folders; an object store would make a bucket
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(path, content)

        self._request(write)

    def rename(self, target: str) -> None:
        def move(fs: Any, path: str) -> None:
            new = _filesystem(target)[1]
            if not fs.async_impl:
                fs.mv(path, new, recursive=True)
                return
            for source in fs.find(path):  # mv() would also copy the folder's own entry
                fs.cp_file(source, new + source.removeprefix(path))
            fs.rm(path, recursive=True)

        self._request(move)

    def delete(self) -> None:
        """Delete a file, or a folder with its content, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._request(lambda fs, path: fs.rm(path, recursive=True))

    def _request(self, call: Callable[[Any, str], T]) -> T:
        for pause_s in (*PAUSES_S, None):
            try:
                fs, path = _filesystem(self.url)
                fs.invalidate_cache()  # other hosts write too
                return call(fs, path)
            except tuple(LASTING) as error:
                number = next(LASTING[kind] for kind in LASTING if isinstance(error, kind))
                raise OSError(number, os.strerror(number), self.url) from error
            except Exception as error:  # every file system has its own errors
                problem = f"{type(error).__name__}: {error}"
                if pause_s is None:
                    raise RemoteFileError(errno.EIO, problem, self.url) from error
                log.debug("%s is tried again after %s", self.url, problem)
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")


Location = Path | RemotePath
"""A file or folder, on a disk or in a remote file system."""


def location(key: str, value: object) -> Location:
    """Return the location of a configured path or URL.

    Raises:
        ConfigError: it is neither, or a package that its kind of URL needs is missing.
    """
    check_path(key, value)
    if "://" not in str(value):
        return Path(str(value))
    refuse_password(key, str(value))
    if not str(value).partition("://")[2].strip("/"):
        raise ConfigError(f"{key} is {str(value)!r}, which names no folder; is a variable empty?")
    try:
        from fsspec import get_filesystem_class  # an installation for planning lacks it

        get_filesystem_class(str(value).partition("://")[0])
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{key} is {str(value)!r}, which cannot be opened: {error}") from error
    return RemotePath(str(value))


def refuse_password(key: str, text: str) -> None:
    """Raise ConfigError if a text has a URL with a password, which a run's files would show."""
    if PASSWORD.search(text):
        raise ConfigError(
            f"{key} has a password in its URL, which logs and checkpoints would show; give it as "
            "the package of that file system reads it, from a file or the environment"
        )


@contextlib.contextmanager
def local_file(path: Location) -> Iterator[Path]:
    """Yield a path on disk: the file itself, or a copy that exists within the block."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dlrm_sharded-") as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(path.read_bytes())
        yield copy


def sizes_of(folder: Location, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes in bytes of those files that exist in a folder, by name."""
    if isinstance(folder, RemotePath):  # one request lists a thousand files
        found = folder.entries()
        return {name: size for name in names if (size := found.get(name)) is not None}
    sizes = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            sizes[name] = (folder / name).stat().st_size
    return sizes


def seen_in_time(look: Callable[[], bool]) -> bool:
    """Return whether `look` succeeds within `LATE_S`: hosts see each other's files with a delay."""
    deadline = time.monotonic() + LATE_S
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's cached object of a URL's file system, and the path in it."""
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(url)
    return fs, path
