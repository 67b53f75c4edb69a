"""Hosts that tests make of this machine: processes with a name and disks of their own."""

import ctypes
import os
import shutil
import socket
import subprocess
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000


def why_no_hosts() -> str | None:
    """Why this machine cannot stand for several hosts; None if it can."""
    if os.geteuid() != 0:
        return "namespaces of mounts and of host names need root"
    if shutil.which("unshare") is None:
        return "there is no unshare, of util-linux"
    made = subprocess.run(
        ["unshare", "--mount", "--uts", "true"], capture_output=True, text=True, check=False
    )
    return made.stderr.strip() or None


def become_host(name: str, *mounts: str) -> None:
    """Let this process be on a host of another name, after `mount` with each of these options."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(name)
    for options in ("--make-rprivate /", *mounts):
        subprocess.run(["mount", *options.split()], check=True)


def on_host(name: str, *mounts: str) -> list[str]:
    """Return the words before a command that let it run on such a host."""
    script = [f"hostname {name}", *(f"mount {options}" for options in mounts), 'exec "$0" "$@"']
    return ["unshare", "--mount", "--uts", "sh", "-c", " && ".join(script)]


def own_disk(folder: Path) -> str:
    """Return the options of a mount with which a host has a folder of its own in its place."""
    return f"-t tmpfs -o mode=755 none {folder}"


def read_only(folder: Path) -> list[str]:
    """Return the options of the mounts with which a host may only read a folder."""
    return [f"--bind {folder} {folder}", f"-o remount,ro,bind {folder}"]
