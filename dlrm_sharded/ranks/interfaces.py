"""Addresses of this host's network interfaces, and the way from here to another address."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
import time
from pathlib import Path

SIOCGIFCONF = 0x8912
"""Linux's request for all IPv4 addresses of interfaces, see netdevice(7)."""

IFREQ_BYTES, MAX_ADDRESSES = 40, 1024
IFREQ_NAME, IFREQ_IPV4 = slice(0, 16), slice(20, 24)
SLOW_LOOKUP_S = 1.0
"""A name server that answers is faster."""

IPV6_TABLE = Path("/proc/net/if_inet6")


def network_name() -> str:
    """Return what only processes with the same interfaces share.

    Two containers of a machine differ, and so do hosts that were cloned with one host name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}_{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def interface_addresses() -> list[tuple[str, str]]:
    """Return names and addresses of interfaces; of each, IPv4 first and in the order of Linux.

    gloo listens at the first address of an interface. IPv6 addresses of one link only are left out.
    """
    requests = array.array("B", bytes(IFREQ_BYTES * MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iL", len(requests), requests.buffer_info()[0])
        num_bytes, _ = struct.unpack("iL", fcntl.ioctl(any_socket, SIOCGIFCONF, asked))
    found = []
    for first in range(0, num_bytes, IFREQ_BYTES):
        request = requests[first : first + IFREQ_BYTES].tobytes()
        name = request[IFREQ_NAME].partition(b"\0")[0].decode()
        found.append((name, socket.inet_ntoa(request[IFREQ_IPV4])))
    if IPV6_TABLE.exists():
        for line in IPV6_TABLE.read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not address.is_link_local:
                found.append((name, str(address)))
    return found


def address_of(interface: str) -> str | None:
    """Return the address at which gloo listens on an interface; None if there is none."""
    return next((address for name, address in interface_addresses() if name == interface), None)


def interface_of(address: str) -> str | None:
    """Return the interface that has an address; None if it is not one of this host."""
    return next((name for name, other in interface_addresses() if other == address), None)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def source_towards(host: str) -> tuple[str, str]:
    """Return this host's address on the way to another one, and the other one's; sends nothing.

    Raises:
        OSError: the name is not known, or there is no way.
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(target)
        return str(way.getsockname()[0]), str(way.getpeername()[0])


def slow_name_lookup(host: str, port: int) -> tuple[float, str]:
    """Return the seconds and words of a slow lookup of a host's name by its address; 0 and "" else.

    torch does it when it connects, for its log, with IPv4 addresses mapped to IPv6. Without an
    answer of a name server, it takes 5 s and more.
    """
    started = time.perf_counter()
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, socket.AF_INET6, flags=socket.AI_V4MAPPED)
        *_, target = found[0]
        socket.getnameinfo(target, socket.NI_NUMERICSERV)
    lookup_s = time.perf_counter() - started
    if lookup_s < SLOW_LOOKUP_S:
        return 0.0, ""
    return lookup_s, (
        f"; looking up the name of {host} took {lookup_s:.0f} s, as no name server answers: torch "
        "does so for each connection, unless /etc/hosts has the address, as ::ffff:10.0.0.1"
    )
