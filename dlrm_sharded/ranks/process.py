"""Settings of this process in Linux and in its C library."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARENT = os.getppid()
"""The parent process when this module was loaded."""

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TOP_PAD_BYTES = 2**26


LAUNCHER_VARIABLE = "DLRM_SHARDED_LAUNCHER_PID"
"""Variable with the process that started the ranks of this host; our launcher sets it."""

ENDS_WITH_PARENT = "DLRM_SHARDED_ENDS_WITH_PARENT"
"""Variable that makes a launcher end when its parent process ends."""


def num_cores() -> int:
    """Return the number of cores that this process can use."""
    return len(os.sched_getaffinity(0))


def threads_of_a_rank(ranks_per_host: int) -> int:
    """Return the default number of threads of a rank, given the number of ranks on its host.

    More threads than cores cost far more than fewer threads do.
    """
    return max(num_cores() // ranks_per_host, 1)


@contextmanager
def quiet_without_reader() -> Iterator[None]:
    """End the process as SIGPIPE would if nobody reads its output anymore, as after `| head`.

    Python ignores the signal, because sockets can lose their readers, too.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # as after `>&-`
                sys.stdout.flush()  # an error at the interpreter's exit could not be caught
    except BrokenPipeError:
        output = select.poll()
        output.register(1, 0)
        if not output.poll(0):  # the error was about a socket
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes there
        raise SystemExit(128 + signal.SIGPIPE) from None


@contextmanager
def kept_signals(numbers: Iterable[signal.Signals]) -> Iterator[Mapping[signal.Signals, Any]]:
    """Restore the handlers of signals after the block; yield the handlers from before it."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield before
    finally:
        set_handlers(before)


def set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Set handlers of signals if this is the main thread; Python allows no other one to."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def forget_frames(error: BaseException) -> None:
    """Clear the local variables of the frames through which an error and its causes passed.

    They refer to the sharded model, and the model to the job's process group.
    """
    errors = [error]
    for one in errors:  # the list grows
        traceback.clear_frames(one.__traceback__)
        related = (one.__cause__, one.__context__)
        errors += [other for other in related if other is not None and other not in errors]


def die_with_parent(parent: int = PARENT, number: signal.Signals = signal.SIGKILL) -> None:
    """Make Linux end this process when its parent dies, so that no orphan holds a GPU.

    Args:
        parent: the process that started this one.
        number: the signal that ends it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        launcher = int(os.environ.get(LAUNCHER_VARIABLE, "0"))
        has_launcher = not launcher or start_ticks(launcher) is not None
        if not has_launcher or os.getppid() != parent:  # it died before: Linux sends nothing
            os.kill(os.getpid(), number)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None if it has ended."""
    try:  # the fields of proc_pid_stat(5) from the third, the state, on
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks for later allocations instead of returning them to Linux.

    Pooled vectors are tens of MB and are allocated anew in every step. If their pages go back to
    Linux, each step faults them in again, which can double the time of a lookup on a CPU, depending
    on the layout of the heap. With other C libraries, nothing changes.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, TOP_PAD_BYTES)


def release_freed_memory() -> None:
    """Return freed blocks to Linux once; with C libraries other than glibc, do nothing."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def forget_peak_memory() -> None:
    """Reset the peak memory that Linux reports for this process, if possible."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size


def resident_bytes() -> int:
    """Return the resident memory of this process, including mapped files and libraries."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
