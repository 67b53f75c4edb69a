"""Chooses the interfaces that connect the hosts of a job, and tries the connections.

gloo would listen at the address that a host's own name resolves to. Debian and most images resolve
it to the loopback, and other hosts have a network there that is closed between them. Ranks then
wait for each other without an error.

listener: the first rank of a host, which the first ranks of all other hosts connect to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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

MAX_THREADS = 64
MAX_SHOWN = 4
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a host listens for the others; `error` says why it cannot.

    Args:
        token: what it sends to whoever connects, as hosts may have equal addresses.
    """

    host: str
    interface: str = ""
    address: str = ""
    port: int = 0
    token: str = ""
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.host} ({self.interface}, {self.address})"


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
    with _listening(store, rank, first_ranks) if rank == first_rank else contextlib.nullcontext():
        listeners = [Listener(**fields) for fields in _read(store, "listener", first_ranks)]
        failures = [listener.error for listener in listeners if listener.error]
        if rank == first_rank:
            tried = [] if failures else _failures(listeners, first_ranks.index(rank))
            store.set(f"failures_{rank}", json.dumps(tried))
        for others in _read(store, "failures", first_ranks):  # all of them have tried
            failures += others
    if failures:
        error = ConfigError(_failed_text(failures))
        error.__cause__ = RankError(error, failed_rank=0, reporter=first_rank, on_all_ranks=True)
        raise error
    if not os.environ.get(GLOO_VARIABLE):
        os.environ[GLOO_VARIABLE] = listeners[first_ranks.index(first_rank)].interface
    if rank == 0:
        more = ", ..." if len(listeners) > MAX_SHOWN else ""
        shown = ", ".join(map(str, listeners[:MAX_SHOWN])) + more
        log.info("%d hosts are connected, tried in both directions: %s", len(listeners), shown)


def _read(store: dist.Store, key: str, ranks: Sequence[int]) -> list[Any]:
    return [json.loads(value) for value in store.multi_get([f"{key}_{rank}" for rank in ranks])]


@contextmanager
def _listening(store: dist.Store, rank: int, first_ranks: Sequence[int]) -> Iterator[None]:
    """Publish where this host listens, and answer connections within the block."""
    host = socket.gethostname()
    try:
        interface, address = _chosen(store, rank, first_ranks)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family)
    except (ConfigError, OSError) as error:
        store.set(f"way_{rank}", json.dumps([LOOPBACK, LOOPBACK]))  # nobody may wait for it
        failed = Listener(host, error=str(error))
        store.set(f"listener_{rank}", json.dumps(dataclasses.asdict(failed)))
        yield
        return
    listener = Listener(host, interface, address, server.getsockname()[1], secrets.token_hex(8))
    thread = threading.Thread(target=_answer, args=(server, listener.token), daemon=True)
    thread.start()
    store.set(f"listener_{rank}", json.dumps(dataclasses.asdict(listener)))
    with server:
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()


def _answer(server: socket.socket, token: str) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # the block has ended
            return
        with connection, contextlib.suppress(OSError):
            connection.sendall(token.encode())


def _chosen(store: dist.Store, rank: int, first_ranks: Sequence[int]) -> tuple[str, str]:
    """Return the interface of this host that others reach, and its address.

    Raises:
        ConfigError: a variable names no interface with an address, or no interface is found.
    """
    own, reached = _way_to_store()
    store.set(f"way_{rank}", json.dumps([own, reached]))
    named = os.environ.get(GLOO_VARIABLE, "").partition(",")[0]
    if named:
        if (address := address_of(named)) is None:
            known = ", ".join(f"{name} ({address})" for name, address in interface_addresses())
            raise ConfigError(
                f"{GLOO_VARIABLE} is {named!r} on {socket.gethostname()}, whose interfaces with an "
                f"address are {known}"
            )
        return named, address
    named = os.environ.get(NCCL_VARIABLE, "").removeprefix("=")
    if address := address_of(named):
        return named, address
    if is_loopback(own):
        own = _address_for_others(store, rank, first_ranks)
    interface = interface_of(own)
    if interface is None:
        raise ConfigError(f"no interface of {socket.gethostname()} has its address {own}")
    return interface, address_of(interface) or own


def _way_to_store() -> tuple[str, str]:
    """Return the addresses of a connection to the job's store: of this host, and of the store."""
    target = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(target, CONNECT_S) as connection:
        return str(connection.getsockname()[0]), str(connection.getpeername()[0])


def _address_for_others(store: dist.Store, rank: int, first_ranks: Sequence[int]) -> str:
    """Return the address at which others reached the store on this host.

    If they did so through a service or a translated address, it is the one towards them.
    """
    others = [first for first in first_ranks if first != rank]
    ways = _read(store, "way", others)
    for _, reached in ways:
        if not is_loopback(reached) and interface_of(reached) is not None:
            return str(reached)
    return source_towards(ways[0][0])[0]


def _failures(listeners: Sequence[Listener], place: int) -> list[str]:
    """Connect the host at a place of the list to all others; return what failed, in words."""
    others = [*listeners[:place], *listeners[place + 1 :]]
    with ThreadPoolExecutor(min(MAX_THREADS, len(others))) as threads:
        reasons = list(threads.map(_why_not_connected, others))
    return [
        f"{listeners[place]} cannot connect to {other}: {why}"
        for other, why in zip(others, reasons, strict=True)
        if why is not None
    ]


def _why_not_connected(other: Listener) -> str | None:
    try:
        with socket.create_connection((other.address, other.port), CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            answer = b""
            while len(answer) < len(other.token) and (part := connection.recv(64)):
                answer += part
    except OSError as error:
        return error.strerror or str(error)
    return None if answer.decode(errors="replace") == other.token else "another program answers"


def _failed_text(failures: Sequence[str]) -> str:
    more = f" (and {len(failures) - 1} more such failures)" if len(failures) > 1 else ""
    return (
        f"{failures[0]}{more}; set {GLOO_VARIABLE} on each host to an interface that the other "
        "hosts reach, or open the network between them to all ports"
    )
