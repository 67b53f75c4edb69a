"""Network namespaces of this machine as the hosts of a job, each with an /etc/hosts of its own.

As Debian installs it, the name of a host is an address of the loopback on that host itself. Beside
the network between the hosts, each one has an interface to a network that carries nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

OPEN, CLOSED, NOWHERE = "open0", "closed0", "nowhere0"
TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
NUMBERS = (1, 2)

ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


def why_not() -> str | None:
    """Why this machine cannot have hosts; None if it can."""
    if os.getuid() != 0:
        return "only root makes network namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], check=False)
    return "this container makes no namespaces" if tried.returncode else None


@dataclass(frozen=True)
class Host:
    """A network namespace; `names` is its /etc/hosts."""

    number: int
    namespace: str
    names: Path

    @property
    def name(self) -> str:
        return f"dlrm{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.1.{self.number}"

    def ip(self, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self.namespace, *arguments], check=True)

    def start(
        self,
        *arguments: str,
        env: dict[str, str],
        cwd: Path,
        stdout: int | IO[str] = subprocess.PIPE,
    ) -> "subprocess.Popen[str]":
        """Start Python on this host, in a session of its own."""
        inside = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts"]
        return subprocess.Popen(
            [*inside, "sh", "-c", ENTER, str(self.names), self.name, sys.executable, *arguments],
            env=env,
            cwd=cwd,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@contextmanager
def two_hosts(folder: Path) -> Iterator[Sequence[Host]]:
    """Two hosts, whose namespaces end with the block."""
    hosts = [Host(n, f"dlrm{os.getpid()}_{n}", folder / f"hosts_{n}") for n in NUMBERS]
    try:
        for host in hosts:
            subprocess.run(["ip", "netns", "add", host.namespace], check=True)
            host.ip("link", "set", "lo", "up")
            host.ip("link", "add", CLOSED, "type", "veth", "peer", NOWHERE)
            names = [f"{'127.0.1.1' if h is host else h.address} {h.name}" for h in hosts]
            # torch looks up the names of addresses, which a name server would not answer here
            names += [f"::ffff:{h.address} open{h.number}" for h in hosts]
            names += ["::ffff:127.0.1.1 self", "::ffff:127.0.0.1 self"]
            host.names.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        first, second = hosts
        first.ip("link", "add", OPEN, "type", "veth", "peer", OPEN, "netns", second.namespace)
        for host in hosts:
            for interface, network in ((CLOSED, "10.66.1"), (OPEN, "10.77.1")):
                host.ip("addr", "add", f"{network}.{host.number}/24", "dev", interface)
                host.ip("link", "set", interface, "up")
            host.ip("link", "set", NOWHERE, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False)
