"""Requests of this process to the operating system."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TOP_PAD_BYTES = 2**26


def die_with_parent() -> None:
    """Make Linux kill this process when its parent dies, so that no orphan holds a GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks for the next allocation; other C libraries do not change.

    Every step allocates tens of MB for pooled vectors. If the kernel gets their pages back, they
    are faulted in again, which can double the time of a lookup on a CPU.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, TOP_PAD_BYTES)
