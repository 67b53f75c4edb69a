"""Chooses the interfaces that connect the hosts of a job, and tries the connections.

gloo would listen at the address that a host's own name resolves to. Debian and most images resolve
it to the loopback, and other hosts have a network there that is closed between them. Ranks then
wait for each other without an error.

way: the interface and address of a host, at which its first rank listens for a try.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from dlrm_sharded.files.errors import ConfigError, RankError
from dlrm_sharded.ranks.interfaces import (
    address_of,
    interface_addresses,
    interface_of,
    is_loopback,
    network_name,
    source_towards,
)

log = logging.getLogger(__name__)

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"

CONNECT_S = 10.0
"""Time in which a host answers a connection of another one."""

MAX_SHOWN = 4


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
        shown = ", ".join([*map(_text, ways.values())][:MAX_SHOWN])
        more = ", ..." if len(ways) > MAX_SHOWN else ""
        log.info("%d hosts are connected, tried in both directions: %s%s", len(ways), shown, more)


def _read(store: dist.Store, key: str, ranks: Sequence[int]) -> list[Any]:
    return [json.loads(value) for value in store.multi_get([f"{key}_{rank}" for rank in ranks])]


def _try_host(store: dist.Store, rank: int, first_ranks: Sequence[int]) -> None:
    """Publish the way to this host, and the first failure to connect to another one.

    Linux answers a connection to a socket that listens, before a program accepts it.
    """
    failure = None
    way: dict[str, Any] = {"host": socket.gethostname()}
    server = None
    try:
        way["interface"], way["address"] = _chosen(store, rank, first_ranks)
        family = socket.AF_INET6 if ":" in way["address"] else socket.AF_INET
        server = socket.create_server((way["address"], 0), family=family, backlog=socket.SOMAXCONN)
        way["port"] = server.getsockname()[1]
    except (ConfigError, OSError) as error:
        failure = str(error)
    store.set(f"way_{rank}", json.dumps(way))
    ways = _read(store, "way", first_ranks)
    for other in ways if all("port" in one for one in ways) else ():
        if failure is None and (why := _why_not_connected(other)):
            failure = f"{_text(way)} cannot connect to {_text(other)}: {why}"
    store.set(f"failure_{rank}", json.dumps(failure))
    _read(store, "failure", first_ranks)  # all of them have tried
    if server is not None:
        server.close()


def _why_not_connected(way: dict[str, Any]) -> str | None:
    try:
        socket.create_connection((way["address"], way["port"]), CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _text(way: dict[str, Any]) -> str:
    return f"{way['host']} ({way['interface']}, {way['address']})"


def _chosen(store: dist.Store, rank: int, first_ranks: Sequence[int]) -> tuple[str, str]:
    """Return the interface of this host that others reach, and its address.

    Raises:
        ConfigError: a variable names no interface with an address, or no interface is found.
    """
    own, _ = source_towards(os.environ["MASTER_ADDR"])
    store.set(f"source_{rank}", json.dumps(own))
    if named := os.environ.get(GLOO_VARIABLE, "").partition(",")[0]:
        if address := address_of(named):
            return named, address
        known = ", ".join(f"{name} ({address})" for name, address in interface_addresses())
        raise ConfigError(
            f"{GLOO_VARIABLE} is {named!r} on {socket.gethostname()}, whose interfaces with an "
            f"address are {known}"
        )
    named = os.environ.get(NCCL_VARIABLE, "").removeprefix("=")
    if address := address_of(named):
        return named, address
    if is_loopback(own):  # the host of the job's store
        other, *_ = _read(store, "source", [first for first in first_ranks if first != rank])
        own, _ = source_towards(other)
    interface = interface_of(own)
    if interface is None:
        raise ConfigError(f"no interface of {socket.gethostname()} has its address {own}")
    return interface, address_of(interface) or own
