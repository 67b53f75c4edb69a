"""A mount namespace for a cluster: what runs in it can be found, however it was started."""

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

LINGER_LIMIT_S = 60.0


@contextmanager
def mount_namespace(hosts: Path) -> Iterator[Path]:
    """A mount namespace with this /etc/hosts, in which no process may be left at the end."""
    made_and_held = 'mount --bind "$0" /etc/hosts && echo made && read -r _'
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation=private", "sh", "-c", made_and_held, str(hosts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as holder:
        if not holder.stdout.readline():
            raise RuntimeError(f"no mount namespace: {holder.communicate()[1]}")
        handle = os.open(f"/proc/{holder.pid}/ns/mnt", os.O_RDONLY)
        holder.communicate()
    namespace = Path(f"/proc/{os.getpid()}/fd/{handle}")
    try:
        yield namespace
    finally:
        left = _kill_lingering(namespace)
        os.close(handle)
        if left:
            raise RuntimeError(f"outlived its cluster, and is killed now: {left}")


def _kill_lingering(namespace: Path) -> dict[int, str]:
    """Process ids and command lines of what did not end by itself."""
    deadline = time.monotonic() + LINGER_LIMIT_S
    while (found := processes_in(namespace, "cmdline")) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill(found)
    return {
        pid: command.replace(b"\0", b" ").decode(errors="replace").strip()
        for pid, command in found.items()
    }


def processes_in(namespace: Path, aspect: Literal["cmdline", "environ"]) -> dict[int, bytes]:
    """What /proc says of the processes of a mount namespace, by their ids."""
    wanted = namespace.stat()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if os.path.samestat((process / "ns/mnt").stat(), wanted):
                found[int(process.name)] = (process / aspect).read_bytes()
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
