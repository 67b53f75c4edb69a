"""Addresses of this host's network interfaces, and the way from here to another address."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915
"""Linux's request for the first IPv4 address of an interface, see netdevice(7)."""

IFREQ_IPV4 = slice(20, 24)
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
    """Return names and addresses of interfaces: the first IPv4 address of each, then IPv6.

    gloo listens at the first address of an interface. IPv6 addresses of one link only are left out.
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
