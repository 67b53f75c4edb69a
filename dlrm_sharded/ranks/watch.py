"""Watches the progress of a rank; when it stops, says which ranks wait for which.

beat: a step has ended.
rest: a time in which no step is expected to end, such as loading, compilation and evaluation.
report: where a rank without progress is; ranks exchange reports through the job's store.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from dlrm_sharded.files.errors import ConfigError, HungRankError, LostRankError, RankError
from dlrm_sharded.ranks.job_store import JobStore, listed, ranks_text
from dlrm_sharded.ranks.store_questions import StoreQuestions

log = logging.getLogger(__name__)

STALL_S = 30.0
"""A rank makes no progress if no step has ended for this time."""

SAMPLE_S = 0.5
POLL_S = 0.1

ANSWER_S = 3.0
"""Time in which the other ranks report; they notice a stall at about the same time."""

STORE_S = 2.0
"""Time limit for the store's answer, in addition to `ANSWER_S`."""

GRACE_S = 5.0
"""Time in which a lost rank can report its own error before this rank exits. When a rank exits,
torchrun ends all others, so their errors could be lost."""

GLOO_ERROR = re.compile(r"gloo|pair closure")
TIMED_OUT = re.compile(r"(?i)timed out|timeout")
CUT_OFF = re.compile(r"(?i)(closed|reset) by peer|broken pipe|connection refused|recv")

COLLECTIVES = {
    *("torch.distributed.distributed_c10d", "torch.autograd", "torch.cuda", "torch.cuda.streams"),
    *("torchrec.distributed.comm_ops", "torchrec.distributed.dist_data"),
    "dlrm_sharded.model.fixed_lengths",
}
"""Modules whose functions wait for other ranks: the backward pass waits for gradients, and CUDA
calls wait for NCCL."""

LIBRARIES = {"torch", "torchrec", "fbgemm_gpu", *sys.stdlib_module_names}


@dataclass(frozen=True, slots=True)
class Beat:
    """The end of a step, at `at_s` on the monotonic clock."""

    step: int
    at_s: float


class Heartbeat:
    """The last beat of this process, read by another thread; at rest until the first one."""

    def __init__(self) -> None:
        self.last: Beat | None = None
        """None at rest."""

    def beat(self, step: int) -> None:
        """Note that a step has ended."""
        self.last = Beat(step, time.monotonic())

    def end(self) -> None:
        """Rest after the last step."""
        self.last = None

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Rest within the block; its end counts as a beat if there was one before."""
        last, self.last = self.last, None
        try:
            yield
        finally:
            self.last = last and Beat(last.step, time.monotonic())


@dataclass(frozen=True, slots=True)
class Report:
    """Where a rank without progress is.

    Args:
        place: the collective or function in which the rank is.
        waits: whether the place is a collective.
    """

    rank: int
    host: str
    place: str
    waits: bool


@dataclass(eq=False)
class Watch:
    """A thread that reports when steps stop ending, and when they end again.

    One rank reports for all of them. A host that cannot reach the store reports that itself.

    Args:
        speaks_for_host: whether this rank is the first of its host.
    """

    heartbeat: Heartbeat
    job: JobStore
    speaks_for_host: bool

    def __post_init__(self) -> None:
        self._store: dist.Store | None = None
        self._questions = StoreQuestions(ANSWER_S + STORE_S, RuntimeError, ConfigError)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after it has reported a stall that it noticed."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def explain(self, error: Exception) -> LostRankError | None:
        """Return an error that explains a collective's error; None if other ranks did not cause it.

        One rank reports it for all, or every rank does if the store does not answer.
        """
        text = str(error)
        if not isinstance(error, dist.DistError) and not GLOO_ERROR.search(text):
            return None
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        place, _ = place_of(reversed(frames))
        lost: LostRankError
        if TIMED_OUT.search(text):
            what, _ = self._where_ranks_are(place, waits=True)
            lost = HungRankError(
                f"a collective has timed out (timeout_s is {self.job.timeout_s:g}): {what}. Raise "
                "timeout_s if ranks are only slow"
            )
        elif CUT_OFF.search(text):
            time.sleep(GRACE_S)
            lost = LostRankError(
                f"lost the connection to another rank {place}: that rank has ended; its own "
                "message or that of its launcher says why"
            )
        else:
            return None
        if self._questions.ask(lambda: self.job.reported_once(lost), None) is None:
            lost.__cause__ = RankError(lost, failed_rank=0, reporter=self.job.rank)
        return lost

    def _watch(self) -> None:
        stalled: Beat | None = None
        while not self._end.wait(SAMPLE_S):
            beat = self.heartbeat.last
            if stalled and beat is not stalled:
                self._go_on(stalled)
                stalled = None
            if beat and not stalled and time.monotonic() - beat.at_s >= STALL_S:
                stalled = beat
                self._report_stall(beat)

    def _report_stall(self, beat: Beat) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place, waits = place_of(frame for frame, _ in traceback.walk_stack(frame))
        what, speaks = self._where_ranks_are(place, waits=waits)
        if not speaks:
            return
        waited_s = time.monotonic() - beat.at_s
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        self._say(
            f"no progress for {waited_s:.0f} s: since {since}, after step {beat.step}, {what}; the "
            f"run ends when a collective has waited for {self.job.timeout_s:g} s (timeout_s)"
        )

    def _go_on(self, stalled: Beat) -> None:
        if (store := self._store) is not None:
            self._questions.ask(lambda: store.delete_key(f"report_{self.job.rank}"), False)
        if self.speaks_for_host and not self._end.is_set():
            stalled_s = time.monotonic() - stalled.at_s
            self._say(f"progress again {stalled_s:.0f} s after step {stalled.step}")

    def _say(self, line: str) -> None:
        if self.job.rank == 0:  # only its log is set up
            log.warning("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)

    def _where_ranks_are(self, place: str, *, waits: bool) -> tuple[str, bool]:
        """Return a text of which ranks wait where for which, and whether this rank reports it.

        Args:
            place, waits: as in this rank's `Report`.
        """
        own = Report(self.job.rank, socket.gethostname(), place, waits)
        reports = self._questions.ask(lambda: self._exchange(own), None)
        if reports is not None:
            return stall_text(reports), reports[0].rank == own.rank
        store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        text = (
            f"{_places([own])}, and cannot reach the job's store at {store}: the connection to "
            "that host is broken, or the process that serves it"
        )
        return text, self.speaks_for_host

    def _exchange(self, own: Report) -> list[Report]:
        """Return the reports of all ranks; those without an answer come last."""
        store = self._store = self._store or self.job.connect_again()
        store.set(f"report_{own.rank}", json.dumps(asdict(own)))
        keys = [f"report_{rank}" for rank in range(self.job.world_size)]
        deadline = time.monotonic() + ANSWER_S
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        came, missing = [], []
        for rank, key in enumerate(keys):
            if store.check([key]):
                came.append(Report(**json.loads(store.get(key))))
            else:
                host = store.get(f"host_{rank}").decode()
                missing.append(Report(rank, host, "without an answer", waits=False))
        return came + missing


def stall_text(reports: Sequence[Report]) -> str:
    """Return a text that says which ranks wait where, and for which."""
    waiting = [report for report in reports if report.waits]
    others = [report for report in reports if not report.waits]
    if not waiting:
        return _places(others)
    text = f"waiting: {_places(waiting)}"
    return f"{text}; waited for: {_places(others)}" if others else text


def _places(reports: Sequence[Report]) -> str:
    by_place: dict[str, list[Report]] = {}
    for report in reports:
        by_place.setdefault(report.place, []).append(report)
    shown = [
        f"{ranks_text([one.rank for one in those], [one.host for one in those])} {place}"
        for place, those in by_place.items()
    ]
    return listed(shown, "; ")


def place_of(frames: Iterable[FrameType]) -> tuple[str, bool]:
    """Return the collective, or else the function, of a call, and whether it is a collective.

    Args:
        frames: frames of the call, the innermost first.
    """
    collective = ""
    for frame in frames:
        module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_qualname
        if module in COLLECTIVES:
            collective = function  # the outermost one
        elif module.partition(".")[0] not in LIBRARIES:
            if collective:
                return f"in {collective} in {function}", True
            return f"in {function} ({Path(frame.f_code.co_filename).name})", False
    return f"in {collective or 'a library'}", bool(collective)
