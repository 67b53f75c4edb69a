"""Where ranks meet: the agent of a launcher opens a new store for every start of the ranks.

torchrun's own rendezvous serves one store for all restarts, in which restarted gloo ranks find the
addresses of dead ranks (pytorch #135712), and it listens on all network interfaces, even where all
ranks run on one host.

agent: the process that starts and watches the ranks of one host.
store: torch's TCPStore; ranks find each other by it.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

from dlrm_sharded.ranks.interfaces import is_loopback, source_towards
from dlrm_sharded.ranks.store_questions import QUESTION_S, StoreQuestions

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(seconds=60)

ADDRESS_KEY = "dlrm_sharded_address"


class StartRendezvous(RendezvousHandler):
    """A rendezvous whose agent serves a new store for every start of the ranks.

    The ranks themselves are clients, so the store answers even if rank 0 dies.

    Args:
        parameters: what torchrun's command line says of the rendezvous.
        hosts: torchrun's rendezvous of several hosts; None if all ranks run on this host, whose
            store then listens on the loopback interface only.
        address: by which the other hosts reach this one; None for what torch says.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        hosts: RendezvousHandler | None,
        address: str | None,
    ) -> None:
        self._parameters = parameters
        self._hosts = hosts
        self._address = address
        self._questions = StoreQuestions(QUESTION_S)
        self._is_gone = False
        self._server: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return self._parameters.backend

    def next_rendezvous(self) -> RendezvousInfo:
        if self._hosts is None:
            self._server = _serve_loopback()
            store = PrefixStore("agent", self._server)
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._server.port))
        info = self._hosts.next_rendezvous()
        theirs = info.bootstrap_store_info
        assert theirs is not None
        if info.rank == 0:
            address = self._address or theirs.master_addr
            self._server = TCPStore(
                address,
                theirs.master_port,
                is_master=True,
                wait_for_workers=False,
                timeout=STORE_TIMEOUT,
            )
            info.store.set(ADDRESS_KEY, address)
        address = info.store.get(ADDRESS_KEY).decode()
        served = RendezvousStoreInfo(address, theirs.master_port)
        return RendezvousInfo(info.store, info.rank, info.world_size, served)

    def is_closed(self) -> bool:
        return self._hosts is not None and self._questions.ask(self._hosts.is_closed, False)

    def set_closed(self) -> None:
        if self._hosts is not None:
            self._questions.ask(self._hosts.set_closed, None)

    def num_nodes_waiting(self) -> int:
        # Without an answer the agent goes on, to hear signals and the end of its ranks, which say
        # more than that the host of the rendezvous has gone.
        if self._hosts is None or self._is_gone:
            return 0
        try:
            return self._questions.ask(self._hosts.num_nodes_waiting, 0)
        except RendezvousError:
            self._is_gone = True
            return 0

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def shutdown(self) -> bool:
        self._server = None
        return self._hosts is None or self._questions.ask(self._hosts.shutdown, False)


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
    torch_serves = _would_serve(host)
    # Only names tell hosts apart that are loopback addresses of one machine: torch compares them.
    if torch_serves is None or (not is_loopback(target) and torch_serves != is_here):
        parameters.config.setdefault("is_host", is_here)
    return parameters.local_addr or (host if is_here else source)


def _would_serve(host: str) -> bool | None:
    """Return whether torch would serve a rendezvous here; None if this question is an error."""
    try:
        return _matches_machine_hostname(host)
    except OSError:  # its own name is not known
        return None


def _serve_loopback() -> TCPStore:
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen(socket.SOMAXCONN)
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
