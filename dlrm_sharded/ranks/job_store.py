"""The store of a job, through which ranks communicate before, and after, a group exists.

meeting: all ranks wait for each other before they form their group, unless one ended with an error.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier, synchronize

from dlrm_sharded.files.errors import (
    ConfigError,
    EndedRankError,
    HungRankError,
    LostRankError,
    RankError,
)
from dlrm_sharded.ranks.attempt import rank_number
from dlrm_sharded.ranks.store_questions import StoreQuestions

POLL_S = 0.1
"""Time between two checks of the store."""

MAX_NAMED = 5
"""Largest number of ranks, hosts or differences that a message names."""

NOBODY = -1
"""Reporter of an error that another rank has already reported."""

_num_groups = itertools.count()
_store_of_one = dist.HashStore()
"""The store of a job without a launcher, which has a single rank."""
_served: dist.Store | None = None
"""The store that rank 0 serves until its process ends: others may read it after rank 0 failed."""


def connect(timeout_s: float) -> dist.Store:
    """Connect to the job's store, which torchrun's agent or else rank 0 serves.

    Raises:
        ConfigError: rank 0 cannot serve the store at the given port.
        LostRankError: no store answers in time.
    """
    global _served
    if "MASTER_ADDR" not in os.environ:
        return _store_of_one
    is_master = rank_number() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", "")
    timeout = timedelta(seconds=timeout_s)
    options = {"is_master": is_master, "wait_for_workers": False, "multi_tenant": True}
    store, details = None, ""
    try:
        # If another program listens there, torch waits forever, without handling signals.
        store = StoreQuestions(timeout_s).ask(
            lambda: dist.TCPStore(host, int(port), timeout=timeout, **options), None
        )
    except (RuntimeError, ValueError) as error:
        details = f" ({str(error).splitlines()[0]})"
    if store is None:
        raise (ConfigError if is_master else LostRankError)(
            f"no store of the job answers at {host}:{port} within {timeout_s:g} s{details}: its "
            "first rank does not run there, or another program has the port"
        )
    _served = store if is_master else _served
    # torchrun's store outlives a restart. Several agents may count restarts differently.
    is_alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_alone else ""
    return dist.PrefixStore(f"dlrm_sharded_{attempt}", store)


def wait_for_all_ranks(timeout_s: float) -> None:
    """Return when every rank of the job has called this, whether or not the job has a group.

    It needs neither a device nor a connection between ranks, only the job's store.
    """
    store = dist.PrefixStore("end", connect(timeout_s))
    barrier(store, int(os.environ["WORLD_SIZE"]), "all_are_here", timeout_s)


def announce_end(message: str, *, is_reported: bool, timeout_s: float) -> None:
    """Inform ranks that come to a meeting later that this rank ended with an error."""
    value = json.dumps([rank_number(), message, is_reported])
    dist.PrefixStore("meeting", connect(timeout_s)).set("ended", value)


class JobStore:
    """The job's store as the ranks of one process group use it.

    Args:
        timeout_s: time that a rank waits for the others.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._job = connect(timeout_s)
        self._prefix = f"group_{next(_num_groups)}"
        self.store = dist.PrefixStore(self._prefix, self._job)

    def connect_again(self) -> dist.Store:
        """Return a separate connection to this group's part of the store."""
        return dist.PrefixStore(self._prefix, connect(self.timeout_s))

    def meet(self) -> None:
        """Return when all ranks have called this.

        Raises:
            EndedRankError: a rank ended with an error before.
            HungRankError: a rank did not come in time.
        """
        deadline = time.monotonic() + self.timeout_s
        ended = dist.PrefixStore("meeting", self._job)
        self.store.set(f"host_{self.rank}", socket.gethostname())
        if self.store.add("arrivals", 1) == self.world_size:
            self.store.set("all_are_here", "")
        while not self.store.check(["all_are_here"]):
            if ended.check(["ended"]):
                raise _ended_error(ended.get("ended"), self.rank)
            if time.monotonic() > deadline:
                ranks = range(self.world_size)
                missing = [r for r in ranks if not self.store.check([f"host_{r}"])]
                message = (
                    f"{ranks_text(missing)} did not start within {self.timeout_s:g} s (timeout_s), "
                    "in which other ranks waited. Raise timeout_s if ranks are only slow to start"
                )
                raise self.reported_once(HungRankError(message))
            time.sleep(POLL_S)

    def from_all_ranks(self, key: str, value: object) -> list[Any]:
        """Return the values of all ranks in their order; rank 0, which may serve the store, waits.

        Args:
            value: a value that JSON can represent; other values are converted to strings.
        """
        data = json.dumps(value, default=str).encode()
        values = synchronize(self.store, data, self.rank, self.world_size, key, self.timeout_s)
        return [json.loads(one) for one in values]

    def reported_once(self, error: LostRankError) -> LostRankError:
        """Mark the error, so that only the first rank that calls this reports it."""
        reporter = self.rank if self.store.add("reports", 1) == 1 else NOBODY
        error.__cause__ = RankError(error, failed_rank=0, reporter=reporter)
        return error


def _ended_error(value: bytes, rank: int) -> EndedRankError:
    failed_rank, message, is_reported = json.loads(value)
    error = EndedRankError(message)
    reporter = NOBODY if is_reported or rank else rank
    error.__cause__ = RankError(error, failed_rank=failed_rank, reporter=reporter)
    return error


def ranks_text(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Return a text of ranks, with their hosts if given, which names only the first few of many."""
    text = f"rank{'s' if len(ranks) > 1 else ''} {listed([*map(str, ranks)], ', ')}"
    return f"{text} ({listed([*dict.fromkeys(hosts)], ', ')})" if hosts else text


def listed(texts: Sequence[str], separator: str) -> str:
    """Join the first `MAX_NAMED` texts, and the number of all others."""
    more = len(texts) - MAX_NAMED
    return separator.join([*texts[:MAX_NAMED], *([f"{more} more"] if more > 0 else [])])
