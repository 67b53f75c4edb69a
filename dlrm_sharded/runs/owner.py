"""The owner of a run's folder: the one process that may write there.

Rank 0 of a job claims the folder before anything is written to it. It locks the file `.owner`,
writes its identity there, and keeps the lock until the process ends in any way. The lock is seen by
all processes of a machine, in containers too. Some shared disks do not propagate it to other
machines, so an owner also touches its file every few seconds, and a process on another machine
takes the folder over only after a minute without a touch. No clocks are compared.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from dlrm_sharded.files.errors import ConfigError, LostFolderError
from dlrm_sharded.files.json_files import read_file
from dlrm_sharded.files.remote_files import Location
from dlrm_sharded.ranks.attempt import is_restart

log = logging.getLogger(__name__)

FILE_NAME = ".owner"
"""File whose first line names the owner, and whose second line identifies the kernel that knows all
locks of the file. It is empty after the owner has released the folder."""

SIGN_OF_LIFE_S = 5.0
"""Time between two touches of an owner's file."""

SILENCE_S = 60.0
"""Time without a touch after which an owner on another machine is considered dead."""


class RunOwner:
    """This process's claim on a folder, with a thread that touches its file."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._path, self._key = folder, folder / FILE_NAME, key
        since = time.strftime("%Y-%m-%d %H:%M:%S+00:00", time.gmtime())
        name = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        self._claim = name.encode() + _boot()
        self._file = self._locked_file()
        self._ended = threading.Event()
        threading.Thread(target=self._give_signs, name="run owner", daemon=True).start()

    def check(self) -> None:
        """Raise LostFolderError if another process has taken the folder over.

        If the file was removed, alone or with the whole folder, both are created again, so that the
        work is not lost.

        Raises:
            LostFolderError: another process owns the folder.
            OSError: the folder cannot be made or read.
        """
        if not self._path.exists():
            with suppress(ConfigError):  # another process was faster
                self._file = self._locked_file()
        found = read_file(self._path)
        if found != self._claim:
            raise LostFolderError(
                f"{self._folder} was taken over by {_name(found)}, because this process gave no "
                f"sign of life for {SILENCE_S:.0f} s or its file was removed; it writes "
                "nothing more there"
            )

    def release(self) -> None:
        """Release the folder, so that another process can claim it."""
        _held.pop(self._folder, None)
        self._ended.set()
        with suppress(OSError, ValueError):  # then the end of the process releases it
            if read_file(self._path) == self._claim:
                self._file.truncate(0)
        self._file.close()

    def _locked_file(self) -> IO[bytes]:
        """Return the file after locking it and writing this process's claim.

        Raises:
            ConfigError: another process owns the folder.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a+b", buffering=0)
        os.register_at_fork(after_in_child=file.close)  # or a child would keep the lock
        is_locked: bool | None = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # another process has the lock, or there are none on this disk
            is_locked = False if isinstance(error, BlockingIOError) else None
        found = read_file(self._path)
        knows_locks = is_locked and found.endswith(_boot())
        if is_locked is False or (found and not knows_locks and self._gives_sign(found)):
            file.close()
            raise ConfigError(
                f"{self._folder} belongs to a job that is in progress: {_name(found)}; wait for "
                f"its end, stop it, or give another {self._key}"
            )
        if found:
            log.warning(
                "%s is taken over from %s, which ended without releasing it",
                self._folder,
                _name(found),
            )
        file.truncate(0)
        file.write(self._claim)
        return file

    def _gives_sign(self, found: bytes) -> bool:
        """Wait a minute; return whether the owner that wrote `found` touched its file meanwhile."""
        message = "%s is owned by %s on another machine; waiting %.0f s to see whether it is alive"
        log.warning(message, self._folder, _name(found), SILENCE_S)
        before = self._last_touch()
        time.sleep(SILENCE_S)
        return self._last_touch() != before

    def _last_touch(self) -> int:
        with self._path.open("rb") as file:  # opening a file makes NFS ask its server
            return os.fstat(file.fileno()).st_mtime_ns

    def _give_signs(self) -> None:
        while not self._ended.wait(SIGN_OF_LIFE_S):
            with suppress(OSError, ValueError):  # a file server that is away for a moment
                os.utime(self._file.fileno())


_held: dict[Path, RunOwner] = {}
"""The folders that this process owns."""


def claim(folder: Path, *, key: str = "hydra.run.dir") -> RunOwner:
    """Make this process the owner of a folder, which is created; return its new or existing claim.

    Args:
        key: config key of the folder, for the error message.

    Raises:
        ConfigError: another process owns the folder.
        OSError: the folder cannot be written.
    """
    folder = folder.resolve()
    if folder not in _held:
        _held[folder] = RunOwner(folder, key)
        atexit.register(_held[folder].release)
    return _held[folder]


def refuse_former_run(folder: Location, resume: object, *, key: str = "hydra.run.dir") -> None:
    """Raise ConfigError if a folder has a run that is not to be resumed."""
    if resume != "auto" and not is_restart() and (folder / "plan.json").exists():
        raise ConfigError(
            f"{folder} already has a run; give another {key}, or continue with resume=auto"
        )


def _name(found: bytes) -> str:
    first_line = found.decode(errors="replace").partition("\n")[0]
    return first_line or "a process that has not said its name"


def _boot() -> bytes:
    """Return the end of a claim, which identifies the running kernel."""
    return b"\n" + Path("/proc/sys/kernel/random/boot_id").read_bytes()
