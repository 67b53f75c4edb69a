"""The rendezvous of a job: where its launchers, and its ranks, meet.

torchrun's own rendezvous listens on all network interfaces, even where all ranks run on one host,
and serves one store for all restarts, in which restarted gloo ranks find the addresses of dead
ranks (pytorch #135712). On several hosts, a launcher does not know at which address others reach
its host.

store: torch's TCPStore, by which ranks find each other.
"""

from __future__ import annotations

import contextlib
import socket
import time

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, utils
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks.host_links import is_loopback, source_towards

LOOPBACK = "127.0.0.1"
BACKEND = "loopback"
STORE_TIMEOUT_S = 60

RESOLVE_S = 60.0
"""Time for the endpoint's name to become known: a pod gets its name only when it starts."""


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one host: each start has its own store on the loopback interface.

    The launcher serves it, so it answers even if rank 0 dies.
    """

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN)
        self.master_port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            self.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            master_listen_fd=listener.detach(),
        )
        return super().next_rendezvous()


def _on_loopback(parameters: RendezvousParameters) -> LoopbackRendezvous:
    return LoopbackRendezvous(LOOPBACK, 0, 0, 1, parameters.run_id, STORE_TIMEOUT_S)


def adapt_rendezvous(config: LaunchConfig) -> None:
    """Make ranks meet on the loopback of a single host, or at an address that all hosts reach."""
    if config.max_nodes == 1:
        rendezvous_handler_registry.register(BACKEND, _on_loopback)
        config.rdzv_backend = BACKEND
    elif config.rdzv_backend == "c10d":
        _set_reached_address(config)


def _set_reached_address(config: LaunchConfig) -> None:
    """Set an address at which other hosts reach this one, if known; keep the user's address.

    torch takes the address to which the host's own name resolves. That can be the loopback, and on
    other hosts the name may resolve to another address, or not at all. It also serves the
    rendezvous on the host of the endpoint only if the host's own name resolves to the endpoint.
    """
    host, _ = utils.parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=DEFAULT_PORT)
    deadline = time.monotonic() + float(config.rdzv_configs.get("read_timeout", RESOLVE_S))
    while True:
        try:
            source, target = source_towards(host)
            break
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"--rdzv-endpoint is {config.rdzv_endpoint}, but {socket.gethostname()} cannot "
                    f"resolve {host} ({error.strerror}); give its address, or add it to /etc/hosts"
                ) from None
            time.sleep(1)
        except OSError:  # the rendezvous will report it
            return
    address = host if source == target else _name_or(source)
    if not is_loopback(target):  # on a loopback, torch lets the first of several launchers serve
        config.rdzv_configs.setdefault("is_host", source == target)
    else:  # hosts that share a machine differ only in their names
        address = host
        with contextlib.suppress(OSError):  # its own name does not resolve
            if not utils._matches_machine_hostname(host):
                address = socket.getfqdn()
    config.local_addr = config.local_addr or address


def _name_or(address: str) -> str:
    """Return this host's name if it resolves to the address, else the address.

    torch numbers hosts in the order of these names.
    """
    name = socket.getfqdn()
    with contextlib.suppress(OSError):
        if address in {found[4][0] for found in socket.getaddrinfo(name, None)}:
            return name
    return address
