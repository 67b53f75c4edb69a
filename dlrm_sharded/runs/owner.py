"""The owner of a run's folder: the one process that may write there.

Rank 0 of a job claims the folder before anything is written to it. A claim is a file `.owner-N`,
made so that it fails if it exists, which is all that it asks of a file system: no locks, and no
clock that hosts share. The claim with the highest number counts. The next process claims N + 1 once
owner N has ended, so that of two processes that see the same end only one succeeds.

An owner that ended without a word is recognized by its process where that can be looked up: on the
same boot of the same host, in the same namespace of processes. Elsewhere its sign of life decides:
an owner touches its claim every few seconds, and is taken for dead after a minute without.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from dlrm_sharded.files.errors import ConfigError, LostFolderError
from dlrm_sharded.files.json_files import open_regular, read_file, replace_file
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.limited import Pid
from dlrm_sharded.ranks.attempt import is_restart, job_id
from dlrm_sharded.ranks.process import sees_processes, start_ticks

log = logging.getLogger(__name__)

CLAIM = re.compile(r"\.owner-(\d+)")
KEPT_CLAIMS = 8
"""Number of the latest claims that stay; a slow contender must not find its number free again."""

SIGN_OF_LIFE_S = 5.0
"""Time between two signs of life of an owner."""

SILENCE_S = 60.0
"""Time without a sign of life after which an owner that cannot be looked up is taken for dead."""

END_S = 30.0
"""Time to wait for the end of this job's former attempt, which its launcher has killed."""

LOOK_S = 0.2
"""Time between two looks at another owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """The process that made a claim.

    Args:
        boot: identifies the boot of the host and the namespaces of processes and times; None if
            processes cannot be looked up here.
        started_ticks: when the process started, in clock ticks since the boot.
        job: identifies the job in all its attempts; None if nothing can restart it.
        folder: the folder as the process knows it.
        folder_inode: number of the folder's inode, which it has by every path; None if unknown.
        since: time of the claim, ISO 8601.
        ended: time at which the owner gave the folder back; None before.
    """

    host: str
    boot: str | None
    pid: Pid
    started_ticks: int | None
    job: str | None
    folder: str
    folder_inode: int | None = None
    since: str
    ended: str | None = None

    @classmethod
    def this_process(cls, folder: Path) -> Claimant:
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            pid=os.getpid(),
            started_ticks=start_ticks(os.getpid()),
            job=job_id(),
            folder=str(folder.resolve()),
            folder_inode=folder.stat().st_ino,
            since=_now(),
        )

    def is_running(self) -> bool | None:
        """Return whether the process lives; None if that cannot be known here."""
        if self.boot is None or self.boot != _boot():
            return None
        ticks = start_ticks(self.pid)
        if ticks is not None:
            return ticks == self.started_ticks
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's process, which /proc may hide
            return None
        return False  # a zombie

    def means(self, folder: Path) -> bool:
        """Return whether a folder is the claimed one, and not a copy of it.

        The path alone does not tell: containers may have the folder elsewhere. Nor does the inode,
        whose number some file systems make up.
        """
        try:
            is_same_path = Path(self.folder).samefile(folder)
        except (OSError, ValueError):  # a damaged claim may have a path that no system has
            is_same_path = False
        return is_same_path or folder.stat().st_ino == self.folder_inode


class RunOwner:
    """This process's claim on a folder, with a thread that gives signs of life."""

    def __init__(self, folder: Path, number: int, claimant: Claimant) -> None:
        self._folder = folder
        self._number = number
        self._claimant = claimant
        self._ended = threading.Event()
        threading.Thread(target=self._give_signs, name="run owner", daemon=True).start()

    def check(self) -> None:
        """Raise LostFolderError if another process has taken the folder over.

        A claim that was removed, alone or with the whole folder, is made again, and so is the
        folder, that the work is not lost.

        Raises:
            LostFolderError: another process owns the folder.
            OSError: the folder cannot be made or read.
        """
        self._folder.mkdir(exist_ok=True)
        if _newest(self._folder) < self._number:
            _create(_claim_path(self._folder, self._number), self._claimant)
        newest = _newest(self._folder)
        if newest == self._number and self._has_own_claim():
            return
        other = _described(_read(_claim_path(self._folder, newest)))
        reason = (
            f"which saw no sign of life of this process for {SILENCE_S:.0f} s"
            if newest > self._number and self._has_own_claim()
            else "after this process's claim was removed from it"
        )
        raise LostFolderError(
            f"{self._folder} was taken over by {other}, {reason}; nothing more is written there"
        )

    def release(self) -> None:
        """Give the folder back; the claim stays and says when."""
        _held.pop(self._folder, None)
        if self._ended.is_set():
            return
        self._ended.set()
        path = _claim_path(self._folder, self._number)
        with suppress(OSError):  # then the end of the process tells
            if self._has_own_claim():  # the folder may be gone, or another one
                replace_file(path, _to_bytes(replace(self._claimant, ended=_now())))

    def _has_own_claim(self) -> bool:
        """Return whether the claim of this number is there, and not another process's.

        Raises:
            OSError: it cannot be read.
        """
        try:
            return read_file(_claim_path(self._folder, self._number)) == _to_bytes(self._claimant)
        except FileNotFoundError:
            return False

    def _give_signs(self) -> None:
        path = _claim_path(self._folder, self._number)
        while not self._ended.wait(SIGN_OF_LIFE_S):
            with suppress(OSError):  # a file server that is away for a moment
                os.utime(path)


_held: dict[Path, RunOwner] = {}
"""The folders that this process owns."""


def claim(folder: Path, *, key: str = "hydra.run.dir") -> RunOwner:
    """Make this process the owner of a folder, which is created; return the claim it may have.

    Args:
        key: config key that names the folder, for the message.

    Raises:
        ConfigError: another process owns the folder.
        OSError: the folder cannot be written.
    """
    folder = folder.resolve()
    if folder in _held:
        return _held[folder]
    folder.mkdir(parents=True, exist_ok=True)
    me = Claimant.this_process(folder)
    while True:
        newest = _newest(folder)
        if newest:
            _wait_for_end(folder, newest, key)
        number = newest + 1
        if _create(_claim_path(folder, number), me) and _newest(folder) == number:
            break
    for old in _numbers(folder):
        if old <= number - KEPT_CLAIMS:
            _claim_path(folder, old).unlink(missing_ok=True)
    owner = _held[folder] = RunOwner(folder, number, me)
    atexit.register(owner.release)
    return owner


def _wait_for_end(folder: Path, number: int, key: str) -> None:
    """Return when the owner has ended; at once if that is known.

    Raises:
        ConfigError: it lives.
    """
    path = _claim_path(folder, number)
    first_sign, begun, is_said = _last_sign(path), time.monotonic(), False
    while True:
        owner = _read(path)
        if (owner is not None and owner.ended is not None) or not path.exists():
            return
        waited_s = time.monotonic() - begun
        is_former_attempt = (
            is_restart() and owner is not None and owner.job is not None and owner.job == job_id()
        )
        is_running = None if owner is None else owner.is_running()
        if is_running is False or (is_running is None and is_former_attempt):
            log.warning("%s was left without a word by %s", folder, _described(owner))
            return
        if is_running is None:
            if _last_sign(path) != first_sign:
                raise _refusal(folder, owner, key)
            if waited_s > SILENCE_S:
                log.warning("%s has shown no sign of life and is taken for dead", _described(owner))
                return
            if not is_said and (owner is not None or waited_s > SIGN_OF_LIFE_S):  # else it is new
                is_said = True
                log.warning(
                    "%s is owned by %s, which cannot be looked up from here; waiting %.0f s for a "
                    "sign of life",
                    folder,
                    _described(owner),
                    SILENCE_S,
                )
        elif owner is not None and not owner.means(folder):
            return  # the claim was copied with the folder
        elif not is_former_attempt or waited_s > END_S:
            raise _refusal(folder, owner, key)
        time.sleep(LOOK_S)


def _refusal(folder: Path, owner: Claimant | None, key: str) -> ConfigError:
    return ConfigError(
        f"{folder} belongs to a job that is in progress: {_described(owner)}; wait for its end, "
        f"stop it, or give another {key}"
    )


def _described(owner: Claimant | None) -> str:
    if owner is None:
        return "a process that has not said its name"
    return f"process {owner.pid} on {owner.host}, since {owner.since}"


def _create(path: Path, claimant: Claimant) -> bool:
    """Write a claim; return whether it did not exist."""
    try:
        file = path.open("xb")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(_to_bytes(claimant))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> Claimant | None:
    """Return what a claim says; None while it is being written, or if it is damaged."""
    try:
        fields = json.loads(read_file(path))
        return read_form(fields, Claimant, name=str(path), may_have_others=True)
    except (OSError, RecursionError, ValueError):
        return None


def _last_sign(path: Path) -> int | None:
    """Return the time of the last sign of life, by the clock of the file system."""
    try:
        with open_regular(path) as file:  # NFS asks its server when a file is opened
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _to_bytes(claimant: Claimant) -> bytes:
    return (json.dumps(asdict(claimant), indent=1) + "\n").encode()


def _claim_path(folder: Path, number: int) -> Path:
    return folder / f".owner-{number}"


def _numbers(folder: Path) -> list[int]:
    return [int(match[1]) for path in folder.iterdir() if (match := CLAIM.fullmatch(path.name))]


def _newest(folder: Path) -> int:
    """Return the highest number of a claim; 0 without any."""
    return max(_numbers(folder), default=0)


def _boot() -> str | None:
    """Return what identifies this boot and the namespaces that its processes are looked up in."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [Path(f"/proc/self/ns/{kind}") for kind in ("pid", "time")]
        found = [str(path.readlink()) for path in spaces if path.is_symlink()]
    except OSError:
        return None
    return " ".join([boot, *found]) if sees_processes() else None


def _now() -> str:
    return datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
