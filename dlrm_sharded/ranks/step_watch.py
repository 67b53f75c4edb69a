"""Says that steps have stopped to end, long before a collective's timeout, and who is waited for.

report: what a rank that makes no progress tells the others, through the job's store.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from dlrm_sharded.files.errors import ConfigError, LostRankError
from dlrm_sharded.ranks.collective_names import LIBRARIES, frames_of, name_of_frames
from dlrm_sharded.ranks.heartbeat import Beat, Heartbeat
from dlrm_sharded.ranks.job_store import ranks_text
from dlrm_sharded.ranks.store_questions import StoreQuestions

log = logging.getLogger(__name__)
T = TypeVar("T")

STALL_S = 30.0
SLOW_STEPS = 5
"""Steps have stopped if none has ended for `STALL_S` and for this many times the last one's
duration."""

SAMPLE_S = 0.5
POLL_S = 0.1

ANSWER_S = 3.0
"""Time in which the other ranks report; they notice at about the same time."""

STORE_S = 2.0
"""Time in which the store answers, beside the time that ranks have."""

MAX_SHOWN = 4
PYTHON_LIBRARY = "/lib/python3"


@dataclass(frozen=True, slots=True)
class Report:
    """Where a rank without progress is.

    Args:
        collective: words for the collective that it waits in; None if it is in none.
        place: words for the function that it is in.
    """

    rank: int
    host: str
    collective: str | None
    place: str


@dataclass(eq=False, kw_only=True)
class StepWatch:
    """A thread that speaks when no step ends, again at intervals that double, and when one does.

    The first rank that can report speaks for all. A host that cannot reach the store says so.

    Args:
        connect: connects to the store of the ranks' group, for this thread alone.
        pending: returns words for a collective that a device has not completed.
        end_text: what happens at the timeout.
    """

    heartbeat: Heartbeat
    rank: int
    world_size: int
    speaks_for_host: bool
    connect: Callable[[], dist.Store]
    pending: Callable[[], str | None]
    end_text: str

    def __post_init__(self) -> None:
        self._main = threading.get_ident()
        self._store: dist.Store | None = None
        self._questions = StoreQuestions(ANSWER_S + STORE_S)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step_watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one that waits for the store ends with the process."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(STORE_S)

    def _watch(self) -> None:
        stalled: Beat | None = None
        num_told = 0
        while not self._end.wait(SAMPLE_S):
            beat = self.heartbeat.last
            if beat is not None and self._store is None:
                self._store = self._in_time(self.connect)
            if stalled is not None and beat is not stalled:
                self._go_on(stalled)
                stalled, num_told = None, 0
            if beat is None:
                continue
            waited_s = time.monotonic() - beat.at_s
            if waited_s >= max(STALL_S, SLOW_STEPS * beat.interval_s) * 2**num_told:
                stalled = beat
                num_told += 1
                self._tell(beat)

    def _tell(self, beat: Beat) -> None:
        own = self._report()
        reports = None
        if (store := self._store) is not None:
            reports = self._in_time(lambda: self._exchange(store, own))
        what = _unreachable_text(own) if reports is None else stall_text(reports)
        is_silent = not self.speaks_for_host if reports is None else reports[0].rank < self.rank
        if is_silent:
            return
        waited_s = time.monotonic() - beat.at_s
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        line = (
            f"no progress for {waited_s:.0f} s: since {since}, after step {beat.step}, {what}; "
            f"{self.end_text}"
        )
        self._say(line)
        if (on_stall := self.heartbeat.on_stall) is not None:
            on_stall(waited_s, beat.step, line)

    def _go_on(self, stalled: Beat) -> None:
        if (store := self._store) is not None:
            self._in_time(lambda: store.delete_key(f"report_{self.rank}"))
        if self.speaks_for_host and not self._end.is_set():
            stalled_s = time.monotonic() - stalled.at_s
            self._say(f"progress again {stalled_s:.0f} s after step {stalled.step}")

    def _say(self, line: str) -> None:
        if self.rank == 0:  # whose log is set up
            log.warning("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)

    def _report(self) -> Report:
        frames = frames_of(sys._current_frames().get(self._main))
        collective = name_of_frames(frames) or self.pending()
        place = collective and f"in {collective}"
        return Report(self.rank, socket.gethostname(), place, f"in {_function(frames)}")

    def _exchange(self, store: dist.Store, own: Report) -> list[Report]:
        """Return the reports of all ranks, those that came first; only the first is read by others.

        A rank that does not report in time is missing.
        """
        store.set(f"report_{self.rank}", json.dumps(asdict(own)))
        keys = [f"report_{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + ANSWER_S
        while not store.check(keys) and time.monotonic() < deadline and not self._end.is_set():
            time.sleep(POLL_S)
        came, missing = [], []
        for rank, key in enumerate(keys):
            if store.check([key]):
                came.append(Report(**json.loads(store.get(key))))
                if rank < self.rank:  # that rank speaks
                    break
            else:
                host = store.get(f"process_{rank}").decode().split()[0]
                missing.append(Report(rank, host, None, "without an answer"))
        return came + missing

    def _in_time(self, question: Callable[[], T]) -> T | None:
        """Ask the store; None if it does not answer, or its server is gone."""
        try:
            return self._questions.ask(question, None)
        except (RuntimeError, ConfigError, LostRankError):
            return None


def stall_text(reports: Sequence[Report]) -> str:
    """Return who waits where, and for whom."""
    waiting: dict[str, list[Report]] = {}
    waited_for: dict[str, list[Report]] = {}
    for report in reports:
        if report.collective is None:
            waited_for.setdefault(report.place, []).append(report)
        else:
            waiting.setdefault(report.collective, []).append(report)
    if len(waiting) == 1 and not waited_for:
        return f"all ranks wait {next(iter(waiting))}, and nothing moves between them"
    text = f"waiting: {_places(waiting) or 'no rank'}"
    return f"{text}; waited for: {_places(waited_for)}" if waited_for else text


def _places(reports: Mapping[str, Sequence[Report]]) -> str:
    shown = [f"{_names(those)} {place}" for place, those in list(reports.items())[:MAX_SHOWN]]
    return "; ".join(shown)


def _names(reports: Sequence[Report]) -> str:
    hosts = list(dict.fromkeys(report.host for report in reports))
    return f"{ranks_text([r.rank for r in reports])} on {', '.join(hosts[:MAX_SHOWN])}"


def _unreachable_text(own: Report) -> str:
    store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"{_names([own])} is {own.collective or own.place}, and cannot reach the job's store at "
        f"{store}: the connection to that host is broken, or the process that serves it"
    )


def _function(frames: Sequence[tuple[str, str]]) -> str:
    """Return the innermost function that is of no library."""
    for file, function in reversed(frames):
        if not any(library in file for library in (*LIBRARIES, PYTHON_LIBRARY)):
            return f"{function} ({Path(file).name})"
    return "a library"
