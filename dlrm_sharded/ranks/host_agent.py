"""The agent of a launcher, which starts and watches the ranks of one host, and where agents meet.

torchrun's own rendezvous listens on all network interfaces, even where all ranks run on one host,
and serves one store for all restarts, in which restarted gloo ranks find the addresses of dead
ranks (pytorch #135712). On several hosts, a launcher does not know how others reach its own.

torchrun's own agent tries a mistake of the user again, and knows of no mistake that another host
has found. When its ranks have ended well, it waits 300 s for agents that may be gone, deaf to
signals. When they have not, it takes the store with it that other agents use.

store: torch's TCPStore; ranks find each other by it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    utils,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig

from dlrm_sharded.files.errors import EXIT_USER_ERROR, PreemptedError
from dlrm_sharded.ranks.attempt import RESTARTS_VARIABLE
from dlrm_sharded.ranks.host_links import is_loopback, source_towards
from dlrm_sharded.ranks.store_questions import QUESTION_S, StoreQuestions

LOOPBACK = "127.0.0.1"
BACKEND = "loopback"
STORE_TIMEOUT_S = 60

LIMIT_AFTER_SUCCESS_S = 300.0
LIMIT_AFTER_END_S = 10.0
LIMIT_AFTER_SIGNAL_S = 4.0
"""Time that an agent waits for the others: after the ranks' success, after any other end, when
another agent may be gone, and after a signal, when its ranks may have taken 25 of 30 s already."""

MISTAKE = "dlrm_sharded_mistake"
"""Key of the agents' store: the line of an error of the user."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class RepeatedMistakeError(Exception):
    """Ranks ended with an error that they would end with again; the message is its line."""


class HostAgent(LocalElasticAgent):
    """An agent that ends with those of the other hosts, for the same reason."""

    made: ClassVar[list[HostAgent]] = []
    """The agent of this process, once torch's launcher has made it."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._questions = StoreQuestions(QUESTION_S, RuntimeError)
        self._failures: Mapping[int, ProcessFailure] = {}
        self._num_starts = 0
        self._has_waited = False
        self.made.append(self)
        handler = self._worker_group.spec.rdzv_handler
        if isinstance(handler, DynamicRendezvousHandler):
            # Without an answer, an agent goes on to hear signals and the end of its ranks.
            for name in ("num_nodes_waiting", "shutdown"):
                questions = StoreQuestions(QUESTION_S, RendezvousError)
                question = functools.partial(questions.ask, getattr(handler, name), 0)
                setattr(handler, name, question)

    def ends(self) -> list[Mapping[str, Any]]:
        """Return what ranks of this host wrote of their ends after the last start.

        See `commands.exit_codes`: `line` is what is shown of the error, and `is_said` whether the
        rank has shown it.
        """
        found = []
        for path in (self._pcontext.error_files if self._pcontext else {}).values():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append(json.loads(Path(path).read_text())["message"]["extraInfo"])
        return [end for end in found if "line" in end]

    def mistake(self) -> str | None:
        """Return the line of an error of the user, which may be empty; None if there is none.

        Whoever ends with 2 before it can write an error file cannot read its command line.
        """
        lines = [end["line"] for end in self.ends() if end["exit_code"] == EXIT_USER_ERROR]
        if any(failure.exitcode == EXIT_USER_ERROR for failure in self._failures.values()):
            lines.append("")
        return lines[0] if lines else None

    def were_preempted(self) -> bool:
        """Return whether ranks of the last start ended after a signal and a checkpoint."""
        return any(end["error_class"] == PreemptedError.__name__ for end in self.ends())

    def wait_for_others(self, limit_s: float) -> None:
        """Wait until the agents of all hosts have ended, but no longer than this."""
        if self._has_waited or self._store is None or self._worker_group.group_world_size == 1:
            return
        self._has_waited = True
        store = self._store
        if (mistake := self.mistake()) is not None:
            self._questions.ask(lambda: store.set(MISTAKE, mistake), None)
        self._exit_barrier_timeout = limit_s
        StoreQuestions(limit_s).ask(super()._exit_barrier, None)

    def _exit_barrier(self) -> None:
        self.wait_for_others(LIMIT_AFTER_END_S if self.were_preempted() else LIMIT_AFTER_SUCCESS_S)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self._failures = result.failures
        return result

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        if self._num_starts:
            self._prepare_restart()
        self._num_starts += 1
        # A store that torch has made for the ranks is for this start alone.
        worker_group.spec.rdzv_handler._bootstrap_store_info = None  # type: ignore[attr-defined]
        super()._initialize_workers(worker_group)

    def _prepare_restart(self) -> None:
        """Say why all ranks start again.

        Raises:
            RepeatedMistakeError: they would end again, as the user has made a mistake.
        """
        mistake, store = self.mistake(), self._store
        assert store is not None, "the agents have met"
        if mistake is None and self._questions.ask(lambda: store.check([MISTAKE]), False):
            mistake = self._questions.ask(lambda: store.get(MISTAKE).decode(), None)
        if mistake is not None:
            raise RepeatedMistakeError(mistake)
        reason = "ranks of another host have ended"
        if self._failures:
            _, failure = cause(self._failures)
            reason = f"local rank {failure.local_rank} {end_text(failure.exitcode)}"
        say(f"{reason}; all ranks start again (restart {self._num_starts})")
        os.environ[RESTARTS_VARIABLE] = str(self._num_starts)


def cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank and failure that has caused the others: the first one.

    The agent itself ends the other ranks with SIGTERM.
    """
    return min(
        failures.items(), key=lambda one: (one[1].exitcode == -signal.SIGTERM, one[1].timestamp)
    )


def end_text(exit_code: int) -> str:
    """Return how a process ended."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    name = names.get(-exit_code, f"signal {-exit_code}")
    hints = {
        "SIGKILL": "; Linux does so when memory runs out",
        "SIGABRT": "; NCCL does so when a collective takes longer than timeout_s, after torch's "
        "flight recorder has written the collectives of each rank",
    }
    return f"was killed by {name}{hints.get(name, '')}"


class LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of one host: each start has a store of its own on the loopback interface.

    The launcher serves it, so it answers even if rank 0 dies.
    """

    def get_backend(self) -> str:
        return BACKEND

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


def _on_loopback(parameters: RendezvousParameters) -> LoopbackRendezvous:
    return LoopbackRendezvous(LOOPBACK, 0, 0, 1, parameters.run_id, STORE_TIMEOUT_S)


def adapt_rendezvous(config: LaunchConfig) -> None:
    """Let the ranks of one host meet on its loopback, and those of several where all reach them."""
    if config.max_nodes == 1:
        with contextlib.suppress(ValueError):  # it is registered already
            rendezvous_handler_registry.register(BACKEND, _on_loopback)
        config.rdzv_backend = BACKEND
    elif config.rdzv_backend == "c10d":
        _set_reached_address(config)


def _set_reached_address(config: LaunchConfig) -> None:
    """Set an address by which other hosts reach this one, if one is known; the user's is kept.

    torch takes what the system says of its own name, which can be the loopback, and other hosts
    can know that name by another address or not at all. It also serves the rendezvous on the host
    of the endpoint only if its own name resolves to the endpoint.
    """
    host, _ = utils.parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=DEFAULT_PORT)
    try:
        source, target = source_towards(host)
    except OSError:  # the rendezvous says so
        return
    is_here = source == target
    try:
        is_named = utils._matches_machine_hostname(host)
    except OSError:  # its own name is not known
        is_named = None
    if is_loopback(target):  # only names tell hosts apart that share a machine
        address = socket.getfqdn() if is_named is False else host
    else:
        address = host if is_here else _name_or(source)
        if is_named != is_here:
            config.rdzv_configs.setdefault("is_host", is_here)
    config.local_addr = config.local_addr or address


def _name_or(address: str) -> str:
    """Return this host's name if it has the address, by whose order hosts have ranks; or that."""
    name = socket.getfqdn()
    with contextlib.suppress(OSError):
        if address in {found[4][0] for found in socket.getaddrinfo(name, None)}:
            return name
    return address
