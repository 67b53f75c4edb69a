"""Settings of this process in Linux and in its C library."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = os.getppid()
"""The parent process when this module was loaded."""

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TOP_PAD_BYTES = 2**26


def die_with_parent() -> None:
    """Let Linux kill this process when its parent dies, so that no orphan holds a GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != PARENT:  # it has died already, so Linux sends nothing
            os.kill(os.getpid(), signal.SIGKILL)


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks for the next allocation instead of returning them to Linux.

    Pooled vectors are tens of MB and are allocated anew in every step. If their pages go back to
    Linux, each step faults them in again, which can double the time of a lookup on a CPU, depending
    on the layout of the heap. Other C libraries stay as they are.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, TOP_PAD_BYTES)
