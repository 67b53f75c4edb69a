"""Chooses the network interfaces that connect the hosts of a job, and tries the connections.

By default, gloo listens at the address to which a host's own name resolves. On Debian and in most
images that is the loopback, and on other hosts it may be a network that is closed between them.
Ranks then wait for each other without an error.

way: the host, interface, address and port at which a rank listens for trial connections.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from pathlib import Path

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks.agreement import as_reported_by_rank_zero
from dlrm_sharded.ranks.job_store import JobStore, listed

log = logging.getLogger(__name__)

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"

CONNECT_S = 10.0
"""Time limit for a connection to another host."""

SIOCGIFADDR = 0x8915
"""Linux's request for the first IPv4 address of an interface, see netdevice(7)."""

IFREQ_IPV4 = slice(20, 24)
IPV6_TABLE = Path("/proc/net/if_inet6")


def connect_hosts(job: JobStore) -> None:
    """Make gloo use an interface that all other hosts reach; all ranks call this before any group.

    On one host, or in one network namespace, it changes nothing.

    Raises:
        ConfigError: a host has no such interface, or cannot connect to another one. All ranks
            raise it.
    """
    networks = job.from_all_ranks("network", network_name())
    others = sorted(networks.index(one) for one in {*networks} - {networks[job.rank]})
    if not others:
        return
    sources = job.from_all_ranks("source", source_towards(os.environ["MASTER_ADDR"])[0])
    way, failure = None, None
    with contextlib.ExitStack() as listening:
        try:
            own = sources[job.rank]
            if is_loopback(own):  # on the host of the job's store
                own, _ = source_towards(sources[others[0]])
            name, address = chosen_interface(own)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
            port = listening.enter_context(server).getsockname()[1]
            way = (f"{socket.gethostname()} ({name}, {address})", address, port)
        except (ConfigError, OSError) as error:
            failure = str(error)
        ways = job.from_all_ranks("way", way)
        if way is not None and all(ways):
            tried = (_why_not_connected(way[0], *ways[other]) for other in others)
            failure = next(filter(None, tried), None)
        failures = job.from_all_ranks("failure", failure)  # all have tried
    if found := [*filter(None, failures)]:
        raise as_reported_by_rank_zero(
            ConfigError(
                f"{found[0]}; set {GLOO_VARIABLE} on each host to an interface that the other "
                "hosts reach, or open the network between them to all ports"
            )
        )
    os.environ[GLOO_VARIABLE] = os.environ.get(GLOO_VARIABLE) or name
    if job.rank == 0:
        hosts = [*dict.fromkeys(text for text, _, _ in ways)]
        log.info(
            "%d hosts are connected, tried in both directions: %s", len(hosts), listed(hosts, ", ")
        )


def _why_not_connected(own: str, other: str, address: str, port: int) -> str | None:
    """Return why another host cannot be reached; None if it can.

    Linux completes a connection to a listening socket before the program accepts it.
    """
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError as error:
        return f"{own} cannot connect to {other}: {error.strerror or error}"
    return None


def chosen_interface(own: str) -> tuple[str, str]:
    """Return the interface that the user names, or the one with address `own`, and its address.

    Raises:
        ConfigError: there is no such interface.
    """
    addresses = interface_addresses()
    first_addresses = dict(reversed(addresses))  # at which gloo listens
    named = os.environ.get(GLOO_VARIABLE, "").partition(",")[0]
    name = named or {address: name for name, address in addresses}.get(own, "")
    if name in first_addresses:
        return name, first_addresses[name]
    reason = f"{GLOO_VARIABLE} is {named!r}" if named else f"no interface has the address {own}"
    known = ", ".join(f"{name} ({address})" for name, address in addresses)
    raise ConfigError(
        f"{reason} on {socket.gethostname()}, whose interfaces with an address are {known}"
    )


def network_name() -> str:
    """Return a name that only processes with the same network interfaces share.

    Two containers of a machine have different names, and so do cloned hosts with equal host names.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}_{Path('/proc/self/ns/net').stat().st_ino}"


def interface_addresses() -> list[tuple[str, str]]:
    """Return interfaces and their addresses: the first IPv4 address of each, then IPv6 addresses.

    gloo listens at the first address of an interface. Link-local IPv6 addresses are left out.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                found.append((name, socket.inet_ntoa(answer[IFREQ_IPV4])))
    lines = IPV6_TABLE.read_text().splitlines() if IPV6_TABLE.exists() else []
    for digits, *_, name in map(str.split, lines):
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if not address.is_link_local:
            found.append((name, str(address)))
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def source_towards(host: str) -> tuple[str, str]:
    """Return this host's address on the route to another host, and that host's; send nothing.

    Raises:
        OSError: the name is unknown, or there is no route.
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(target)
        return str(way.getsockname()[0]), str(way.getpeername()[0])
