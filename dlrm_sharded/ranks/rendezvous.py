"""Where the launchers of a job meet, and its ranks.

torchrun's own rendezvous listens on all network interfaces, even where all ranks run on one host,
and serves one store for all restarts, in which restarted gloo ranks find the addresses of dead
ranks (pytorch #135712). On several hosts, a launcher does not know how others reach its own.

store: torch's TCPStore; ranks find each other by it.
"""

from __future__ import annotations

import copy
import functools
import os
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)
from torch.distributed.launcher.api import LaunchConfig

from dlrm_sharded.ranks.interfaces import is_loopback, source_towards
from dlrm_sharded.ranks.store_questions import QUESTION_S, StoreQuestions

LOOPBACK = "127.0.0.1"
ADDRESS_KEY = "dlrm_sharded_address"
ONE_STORE_OFF = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's variable that lets each start have a store of its own."""

STORE_TIMEOUT_S = 60


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one host: each start has a store of its own on the loopback interface.

    The launcher serves it, so it answers even if rank 0 dies.
    """

    def __init__(self, run_id: str) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, run_id, STORE_TIMEOUT_S)

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN)
        self._store = store = TCPStore(
            LOOPBACK,
            port := listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )
        served = RendezvousStoreInfo(LOOPBACK, port)
        return RendezvousInfo(PrefixStore("agent", store), 0, 1, served)


def replace_rendezvous(config: LaunchConfig) -> None:
    """Let the launchers meet by a rendezvous of ours; a static one of several hosts is torch's."""
    backend = config.rdzv_backend
    if config.max_nodes > 1 and backend == "static":
        return

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        handler: Any = LoopbackRendezvous(parameters.run_id)
        if parameters.max_nodes > 1:
            theirs = copy.copy(parameters)
            theirs.backend = backend
            address = reached_address(theirs) if backend == "c10d" else parameters.local_addr
            handler = rendezvous_handler_registry.create_handler(theirs)
            handler.next_rendezvous = functools.partial(_meet, handler.next_rendezvous, address, [])
            # Without an answer, an agent goes on to hear signals and the end of its ranks.
            for name in ("num_nodes_waiting", "shutdown"):
                questions = StoreQuestions(QUESTION_S, RendezvousError)
                setattr(handler, name, functools.partial(questions.ask, getattr(handler, name), 0))
        handler.get_backend = lambda: parameters.backend  # the registry compares them
        return cast(RendezvousHandler, handler)

    config.rdzv_backend = f"dlrm_sharded_{uuid.uuid4().hex}"  # a name cannot be registered twice
    rendezvous_handler_registry.register(config.rdzv_backend, create)


def _meet(
    next_rendezvous: Callable[[], RendezvousInfo], address: str | None, served: list[TCPStore]
) -> RendezvousInfo:
    """Return where ranks meet: in a store of this start, at an address that other hosts reach.

    torch orders hosts by their names, and would have ranks meet at such a name.

    Args:
        served: the store that this launcher serves, if its host has rank 0.
    """
    os.environ[ONE_STORE_OFF] = "1"
    info = next_rendezvous()
    os.environ[ONE_STORE_OFF] = "0"  # launchers serve the stores, so they answer if a rank dies
    theirs = info.bootstrap_store_info
    assert theirs is not None
    if info.rank == 0:
        own, port = address or theirs.master_addr, theirs.master_port
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        served[:] = [TCPStore(own, port, None, True, timeout, wait_for_workers=False)]
        info.store.set(ADDRESS_KEY, own)
    reached = RendezvousStoreInfo(info.store.get(ADDRESS_KEY).decode(), theirs.master_port)
    return RendezvousInfo(info.store, info.rank, info.world_size, reached)


def reached_address(parameters: RendezvousParameters) -> str | None:
    """Return an address by which other hosts of a rendezvous reach this one; None if none is known.

    torch takes what the system says of its own name, which can be the loopback, and other hosts
    can know that name by another address or not at all. It also serves the rendezvous on the host
    of the endpoint only if its own name resolves to the endpoint. Options of the user are kept.
    """
    host, _ = parse_rendezvous_endpoint(parameters.endpoint, default_port=DEFAULT_PORT)
    try:
        source, target = source_towards(host)
    except OSError:  # the rendezvous says so
        return parameters.local_addr
    is_here = source == target or is_loopback(target)
    try:
        torch_serves = _matches_machine_hostname(host)
    except OSError:  # its own name is not known
        torch_serves = None
    # Only names tell hosts apart that are loopback addresses of one machine: torch compares them.
    if torch_serves is None or (not is_loopback(target) and torch_serves != is_here):
        parameters.config.setdefault("is_host", is_here)
    return parameters.local_addr or (host if is_here else source)
