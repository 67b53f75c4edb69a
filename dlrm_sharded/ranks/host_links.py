"""Chooses the interfaces that connect the hosts of a job, and tries the connections.

gloo would listen at the address that a host's own name resolves to. Debian and most images resolve
it to the loopback, and other hosts have a network there that is closed between them. Ranks then
wait for each other without an error.

way: the interface and address of a host, at which its first rank listens for a try.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import logging
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dlrm_sharded.files.errors import ConfigError, RankError
from dlrm_sharded.ranks.job_store import listed

log = logging.getLogger(__name__)

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

CONNECT_S = 10.0
"""Time in which a host answers a connection of another one."""

SIOCGIFADDR = 0x8915
"""Linux's request for the first IPv4 address of an interface, see netdevice(7)."""

IFREQ_IPV4 = slice(20, 24)
IPV6_TABLE = Path("/proc/net/if_inet6")


def connect_hosts(store: dist.Store, rank: int, world_size: int) -> None:
    """Let gloo use an interface that all other hosts reach; all ranks call it before any group.

    A job of one host, or of one network namespace, stays as it is.

    Args:
        store: keys of this call only; its timeout bounds the waiting.

    Raises:
        ConfigError: a host has no such interface, or cannot connect to another one. All ranks
            raise it, and the first one of each host reports it.
    """
    store.set(f"network_{rank}", network_name())
    networks = store.multi_get([f"network_{r}" for r in range(world_size)])
    first_ranks = sorted(networks.index(network) for network in set(networks))
    if len(first_ranks) == 1:
        return
    first_rank = networks.index(networks[rank])
    if rank == first_rank:
        _try_host(store, rank, first_ranks)
    if failures := [text for text in _read(store, "failure", first_ranks) if text]:
        error = ConfigError(
            f"{failures[0]}; set {GLOO_VARIABLE} on each host to an interface that the other hosts "
            "reach, or open the network between them to all ports"
        )
        error.__cause__ = RankError(error, failed_rank=0, reporter=first_rank, on_all_ranks=True)
        raise error
    ways = dict(zip(first_ranks, _read(store, "way", first_ranks), strict=True))
    if not os.environ.get(GLOO_VARIABLE):
        os.environ[GLOO_VARIABLE] = ways[first_rank]["interface"]
    if rank == 0:
        shown = listed([*map(_text, ways.values())], ", ")
        log.info("%d hosts are connected, tried in both directions: %s", len(ways), shown)


def _read(store: dist.Store, key: str, ranks: Sequence[int]) -> list[Any]:
    return [json.loads(value) for value in store.multi_get([f"{key}_{rank}" for rank in ranks])]


def _try_host(store: dist.Store, rank: int, first_ranks: Sequence[int]) -> None:
    """Publish the way to this host, and the first failure to connect to another one.

    Linux answers a connection to a socket that listens, before a program accepts it.
    """
    failure = None
    way: dict[str, Any] = {"host": socket.gethostname()}
    with contextlib.ExitStack() as stack:
        try:
            way["interface"], way["address"] = _chosen(store, rank, first_ranks)
            family = socket.AF_INET6 if ":" in way["address"] else socket.AF_INET
            server = socket.create_server(
                (way["address"], 0), family=family, backlog=socket.SOMAXCONN
            )
            way["port"] = stack.enter_context(server).getsockname()[1]
        except (ConfigError, OSError) as error:
            failure = str(error)
        store.set(f"way_{rank}", json.dumps(way))
        ways = _read(store, "way", first_ranks)
        if all("port" in one for one in ways):
            failures = (_why_not_connected(way, other) for other in ways)
            failure = next(filter(None, failures), None)
        store.set(f"failure_{rank}", json.dumps(failure))
        _read(store, "failure", first_ranks)  # all of them have tried


def _why_not_connected(way: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    try:
        socket.create_connection((other["address"], other["port"]), CONNECT_S).close()
    except OSError as error:
        return f"{_text(way)} cannot connect to {_text(other)}: {error.strerror or error}"
    return None


def _text(way: Mapping[str, Any]) -> str:
    return f"{way['host']} ({way['interface']}, {way['address']})"


def _chosen(store: dist.Store, rank: int, first_ranks: Sequence[int]) -> tuple[str, str]:
    """Return the interface of this host that others reach, and its address.

    Raises:
        ConfigError: a variable names no interface with an address, or no interface is found.
    """
    own, _ = source_towards(os.environ["MASTER_ADDR"])
    store.set(f"source_{rank}", json.dumps(own))
    addresses = interface_addresses()
    first_addresses = dict(reversed(addresses))  # at which gloo listens
    named = os.environ.get(GLOO_VARIABLE, "").partition(",")[0]
    name = named or os.environ.get(NCCL_VARIABLE, "").removeprefix("=")
    if not named and name not in first_addresses:
        if is_loopback(own):  # the host of the job's store
            other, *_ = _read(store, "source", [first for first in first_ranks if first != rank])
            own, _ = source_towards(other)
        name = {address: name for name, address in addresses}.get(own, "")
    if name in first_addresses:
        return name, first_addresses[name]
    reason = f"{GLOO_VARIABLE} is {named!r}" if named else f"no interface has the address {own}"
    known = ", ".join(f"{name} ({address})" for name, address in addresses)
    raise ConfigError(
        f"{reason} on {socket.gethostname()}, whose interfaces with an address are {known}"
    )


def network_name() -> str:
    """Return what only processes with the same interfaces share.

    Two containers of a machine differ, and so do hosts that were cloned with one host name.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}_{Path('/proc/self/ns/net').stat().st_ino}"


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
