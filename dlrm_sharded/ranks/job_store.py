"""The store of a job, through which ranks know of each other before, and after, a group exists.

meeting: all ranks come, before they start their group, unless one has ended with an error.
roll call: after a collective failed, ranks say where they waited; whoever does not come is missing.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from dlrm_sharded.files.errors import (
    ConfigError,
    EndedRankError,
    HungRankError,
    LostRankError,
    RankError,
)
from dlrm_sharded.ranks.attempt import rank_number
from dlrm_sharded.ranks.collective_names import collective_name
from dlrm_sharded.ranks.interfaces import slow_name_lookup
from dlrm_sharded.ranks.process import is_stopped, parent_of

log = logging.getLogger(__name__)

POLL_S = 0.1
"""Time between two looks at the store."""

RESERVE_S = 10.0
RESERVE_SHARE = 0.25
"""Time that a roll call has before the ranks' timeout ends: this long, but at most this share of
the timeout. Ranks answer in the first half of it."""

HELD_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
CUT_OFF = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|recv, error|failed to recv",
    re.IGNORECASE,
)
OF_GLOO = re.compile(r"gloo|pair closure")
GRACE_S = 5.0
"""Time that a rank gives one that has left to report its error. The first rank that exits makes
torchrun end all others, so that an error could be lost."""

EARLY_SHARE = 0.5
"""Share of a group's timeout before which no collective can have waited for all of it."""

PORT_TAKEN = "EADDRINUSE"
"""Part of torch's message about a store that cannot listen."""

TAKEN_TEXT = "is taken by another program, perhaps by another job; give all ranks a free port"

NOBODY = -1
"""The reporter of an error that another rank has reported."""

_num_groups = itertools.count()


def connect(timeout_s: float) -> dist.Store:
    """Connect to the job's store, which torchrun's agent serves, or else rank 0."""
    port = os.environ.get("MASTER_PORT", "")
    if not port.isdecimal():
        raise ConfigError(f"MASTER_PORT is {port!r}, must be a port; MASTER_ADDR is set")
    is_master = rank_number() == 0 and not _agent_serves()
    store = open_store(
        os.environ["MASTER_ADDR"], int(port), is_master=is_master, timeout_s=timeout_s
    )
    attempt = ""
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # torchrun's store outlives a restart. With several agents, their counts may differ.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"dlrm_sharded_{attempt}", store)


def open_store(host: str, port: int, *, is_master: bool, timeout_s: float) -> dist.Store:
    """Serve a store of a job, or connect to it.

    Raises:
        ConfigError: the port is taken.
        LostRankError: no store answers in time.
    """
    made: list[dist.Store | Exception] = []

    def make() -> None:
        timeout = timedelta(seconds=timeout_s)
        with_server = {"is_master": is_master, "wait_for_workers": False, "multi_tenant": True}
        try:
            made.append(dist.TCPStore(host, port, timeout=timeout, **with_server))
        except Exception as error:  # raised below
            made.append(error)

    # Torch waits for ever, deaf to signals, for an answer of another program that listens there.
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if made and isinstance(made[0], dist.Store):
        return made[0]
    if made and PORT_TAKEN in str(made[0]):
        raise ConfigError(f"port {port} of {host} {TAKEN_TEXT}")
    details = f" ({str(made[0]).splitlines()[0]})" if made else ""
    raise LostRankError(
        f"no store of the job answers at {host}:{port} within {timeout_s:g} s{details}: its first "
        f"rank does not run there, or another program has the port{slow_name_lookup(host, port)[1]}"
    )


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def wait_for_all_ranks(timeout_s: float) -> None:
    """Return when every rank of the job has called this, before or after the job had a group.

    It needs neither a device nor a connection between ranks: only the job's store.
    """
    timeout = timedelta(seconds=timeout_s)
    store = dist.PrefixStore("end", connect(timeout_s))
    world_size = int(os.environ["WORLD_SIZE"])
    if store.add("arrivals", 1) == world_size:
        store.set("all_are_here", "")
    store.wait(["all_are_here"], timeout)
    if store.add("departures", 1) == world_size:
        store.set("all_have_left", "")
    if rank_number() == 0:  # its process may serve the store to the others
        store.wait(["all_have_left"], timeout)


def announce_end(message: str, *, is_reported: bool, timeout_s: float) -> None:
    """Tell ranks that come to a meeting later that this one has ended with an error."""
    value = json.dumps([rank_number(), message, is_reported])
    dist.PrefixStore("meeting", connect(timeout_s)).set("ended", value)


class JobStore:
    """The job's store as the ranks of one process group use it.

    Args:
        timeout_s: time that a rank waits for the others in all, with a roll call.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._reserve_s = min(RESERVE_S, RESERVE_SHARE * timeout_s)
        self._processes: dict[int, str] = {}
        self._met_s = math.inf
        self._job = connect(timeout_s)
        self._prefix = f"group_{next(_num_groups)}"
        self._store = dist.PrefixStore(self._prefix, self._job)

    @property
    def group_timeout_s(self) -> float:
        """Time after which a collective fails, so that a roll call ends within the timeout."""
        return self._timeout_s - self._reserve_s

    @property
    def stall_s(self) -> float:
        """Time in a collective after which its own timeout is overdue."""
        return self.group_timeout_s + self._reserve_s / 5

    def raise_stall(self, place: str) -> None:
        """Raise the error that `explain` returns, for a collective that does not come back."""
        raise self._in_time(lambda: self._roll_call(place), place)

    @property
    def for_group(self) -> dist.Store:
        return dist.PrefixStore("group", self._store)

    @property
    def for_facts(self) -> dist.Store:
        return dist.PrefixStore("facts", self._store)

    @property
    def for_hosts(self) -> dist.Store:
        return dist.PrefixStore("hosts", self._store)

    def connect_again(self) -> dist.Store:
        """Return a connection of its own to this group's part of the store."""
        return dist.PrefixStore(self._prefix, connect(self._timeout_s))

    def meet(self) -> None:
        """Return when all ranks have come.

        Raises:
            EndedRankError: a rank has ended with an error before.
            HungRankError: a rank did not come in time.
        """
        deadline = time.monotonic() + self.group_timeout_s
        ended = dist.PrefixStore("meeting", self._job)
        identity = f"{socket.gethostname()} {os.getppid()} {os.getpid()}"
        self._store.set(f"process_{self._rank}", identity)
        if self._store.add("arrivals", 1) == self._world_size:
            self._store.set("all_are_here", "")
        while not self._store.check(["all_are_here"]):
            if ended.check(["ended"]):
                raise _ended_error(ended.get("ended"), self._rank)
            if time.monotonic() > deadline:
                missing = self._without("process")
                message = (
                    f"{ranks_text(missing)} did not start within {self.group_timeout_s:g} s; other "
                    f"ranks waited (timeout_s is {self._timeout_s:g}). Raise timeout_s if "
                    f"{_it(missing)} only slow to start"
                )
                raise self._reported_once(HungRankError(message))
            time.sleep(POLL_S)
        self._met_s = time.monotonic()
        self._process_of(0)  # it may serve the store, and then could not be asked when it hangs

    def explain(self, error: Exception) -> LostRankError | None:
        """Return what an error of a collective means, or None if it is not about other ranks.

        After a timeout this holds a roll call.
        """
        text = str(error)
        if not isinstance(error, dist.DistError) and not OF_GLOO.search(text):
            return None
        place = collective_name(error)
        if HELD_OUT.search(text):
            waited_s = time.monotonic() - self._met_s
            if waited_s < EARLY_SHARE * self.group_timeout_s:  # gloo gives up connecting earlier
                message = (
                    f"no connection to another rank in {place} {waited_s:.0f} s after all ranks "
                    f"had started: {text.splitlines()[0]}"
                )
                return self._in_time(lambda: self._reported_once(LostRankError(message)), place)
            return self._in_time(lambda: self._roll_call(place), place)
        if CUT_OFF.search(text):
            time.sleep(GRACE_S)
            return self._in_time(lambda: self._lost(place), place)
        return None

    def _lost(self, place: str) -> LostRankError:
        self._store.set(f"place_{self._rank}", place)
        message = (
            f"lost the connection to another rank in {place}: that rank has ended; its own message "
            "or that of its launcher says why"
        )
        return self._reported_once(LostRankError(message))

    def _roll_call(self, place: str) -> LostRankError:
        self._store.set(f"place_{self._rank}", place)
        deadline = time.monotonic() + self._reserve_s / 2
        while (missing := self._without("place")) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        waited = f"after {self.group_timeout_s:g} s of waiting (timeout_s is {self._timeout_s:g})"
        if missing:
            here = [rank for rank in range(self._world_size) if rank not in missing]
            message = (
                f"{ranks_text(missing)} did not come to {place}, where {ranks_text(here)} waited, "
                f"nor answered a roll call {waited}: {self._states(missing)}. Raise timeout_s if "
                f"{_it(missing)} only slow"
            )
        else:
            places = {
                rank: self._store.get(f"place_{rank}").decode() for rank in range(self._world_size)
            }
            message = f"all ranks answered a roll call {waited}: " + "; ".join(
                f"rank {rank} waited in {name}" for rank, name in places.items()
            )
        error = HungRankError(message)
        error.processes = tuple(self._siblings(missing).values())
        return self._reported_once(error)

    def _without(self, key: str) -> list[int]:
        """Return the ranks that have not set their key."""
        if self._store.check([f"{key}_{rank}" for rank in range(self._world_size)]):
            return []
        return [r for r in range(self._world_size) if not self._store.check([f"{key}_{r}"])]

    def _reported_once(self, error: LostRankError) -> LostRankError:
        """Let the first rank that comes here report the error, for all of them."""
        is_first = self._store.add("reports", 1) == 1
        error.__cause__ = RankError(
            error, failed_rank=0, reporter=self._rank if is_first else NOBODY
        )
        return error

    def _in_time(self, ask: Callable[[], LostRankError], place: str) -> LostRankError:
        """Ask the store in a thread: a store that a hung rank 0 serves never answers."""
        answers: list[LostRankError] = []

        def run() -> None:
            try:
                answers.append(ask())
            except Exception as error:  # the store's: its server is gone
                log.debug("the job's store failed: %s", error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._reserve_s)
        if answers:
            return answers[0]
        server = "torchrun" if _agent_serves() else "rank 0"
        state = "does not answer: it hangs, or is not reached" if thread.is_alive() else "is gone"
        message = f"waited in {place} in vain, and {server}, which serves the job's store, {state}"
        lost = LostRankError(message)
        if thread.is_alive():
            lost = HungRankError(message)
            lost.processes = () if _agent_serves() else tuple(self._siblings([0]).values())
        lost.__cause__ = RankError(lost, failed_rank=0, reporter=self._rank)
        return lost

    def _siblings(self, ranks: list[int]) -> dict[int, int]:
        """Return the processes of those ranks that the parent of this process has started."""
        found = {}
        for rank in ranks:
            host, parent, pid = self._process_of(rank).split()
            same = host == socket.gethostname() and int(parent) == os.getppid()
            if same and parent_of(int(pid)) == os.getppid():
                found[rank] = int(pid)
        return found

    def _process_of(self, rank: int) -> str:
        """Return host, parent and number of a rank's process."""
        if rank not in self._processes:
            self._processes[rank] = self._store.get(f"process_{rank}").decode()
        return self._processes[rank]

    def _states(self, ranks: list[int]) -> str:
        stopped = [rank for rank, pid in self._siblings(ranks).items() if is_stopped(pid)]
        if stopped:
            return f"a signal has stopped {ranks_text(stopped)}"
        return f"{_it(ranks)} stopped, in another collective, or not reached"


def _ended_error(value: bytes, rank: int) -> EndedRankError:
    failed_rank, message, is_reported = json.loads(value)
    error = EndedRankError(message)
    reporter = NOBODY if is_reported or rank else rank
    error.__cause__ = RankError(error, failed_rank=failed_rank, reporter=reporter)
    return error


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words, the first few of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {shown}{more}"


def _it(ranks: list[int]) -> str:
    return "it is" if len(ranks) == 1 else "they are"
