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

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(seconds=60)


class StartRendezvous(RendezvousHandler):
    """A rendezvous whose agent serves a new store for every start of the ranks.

    The ranks themselves are clients, so the store answers even if rank 0 dies.

    Args:
        parameters: what torchrun's command line says of the rendezvous.
        hosts: torchrun's rendezvous of several hosts; None if all ranks run on this host, whose
            store then listens on the loopback interface only.
    """

    def __init__(self, parameters: RendezvousParameters, hosts: RendezvousHandler | None) -> None:
        self._parameters = parameters
        self._hosts = hosts
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
        if info.rank == 0:
            address = info.bootstrap_store_info
            assert address is not None
            self._server = TCPStore(
                address.master_addr,
                address.master_port,
                is_master=True,
                wait_for_workers=False,
                timeout=STORE_TIMEOUT,
            )
        return info

    def is_closed(self) -> bool:
        return self._hosts is not None and self._hosts.is_closed()

    def set_closed(self) -> None:
        if self._hosts is not None:
            self._hosts.set_closed()

    def num_nodes_waiting(self) -> int:
        return 0 if self._hosts is None else self._hosts.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def shutdown(self) -> bool:
        self._server = None
        return self._hosts is None or self._hosts.shutdown()


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
