"""Linux settings of a process."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
TOP_PAD_BYTES = 2**26


def die_with_parent() -> None:
    """Have this process killed when its parent dies, so that no orphan of torchrun holds a GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Have glibc keep large freed blocks for the next allocation, not return them to the kernel.

    Pooled vectors are tens of MB, allocated anew in every step: given back, their pages are
    faulted in each time, which can double the time of a lookup on a CPU, or not, as the heap
    happens to lie. Other C libraries stay as they are.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, TOP_PAD_BYTES)
