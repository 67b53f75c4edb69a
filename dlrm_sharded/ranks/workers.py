"""Runs functions in processes of their own, several at once, and ends those that take too long."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from dlrm_sharded.files.errors import InfeasibleTaskError, UserError
from dlrm_sharded.ranks.process import die_with_parent

T = TypeVar("T")

Warnings = tuple[tuple[str, str], ...]
"""The text of each warning, without its figures and with them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a function has no result: an error's message, or that its time was over.

    Args:
        is_infeasible: whether the error says that no plan fits.
        seconds: time until this was known.
    """

    message: str
    is_infeasible: bool = False
    seconds: float = field(default=0.0, compare=False)


class _Worker:
    """A fork of this process that runs a function for some seconds."""

    def __init__(self, index: int, function: Callable[[], object], limit_s: float) -> None:
        context = multiprocessing.get_context("fork")  # a new process would load torch for seconds
        self.index = index
        self.receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_run, args=(sender, function, os.getpid()), daemon=True
        )
        self._process.start()
        sender.close()
        self._limit_s = limit_s
        self._ends = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def result(self) -> tuple[Any, Warnings]:
        """Return the result of the function and its warnings, or why it has none."""
        result, warnings = self._received()
        if isinstance(result, Refusal):
            result = dataclasses.replace(result, seconds=self._limit_s - self.left_s)
        return result, warnings

    def _received(self) -> tuple[Any, Warnings]:
        if not self.receiver.poll():
            return Refusal(f"it takes more than {self._limit_s:g} s"), ()
        try:
            received: tuple[Any, Warnings] = self.receiver.recv()
        except EOFError:
            self._process.join()
            return Refusal(f"its process ended with exit code {self._process.exitcode}"), ()
        return received

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.receiver.close()


def in_processes(
    functions: Sequence[Callable[[], T]],
    *,
    limit_s: float,
    num_workers: int,
    done: Callable[[int, T | Refusal], None] = lambda index, result: None,
) -> list[T | Refusal]:
    """Return what functions return, each in a fork of this process, or why it does not.

    Warnings of all processes are logged here, and those that differ only in their figures once.

    Args:
        limit_s: time of one function.
        num_workers: number of processes at once.
        done: called with the index of each function that has ended, and its result.
    """
    results: dict[int, T | Refusal] = {}
    warned: set[str] = set()
    running: list[_Worker] = []
    waiting = list(enumerate(functions))[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                running.append(_Worker(*waiting.pop(), limit_s))
            least_s = min(worker.left_s for worker in running)
            ready = wait([worker.receiver for worker in running], timeout=least_s)
            for worker in [w for w in running if w.receiver in ready or not w.left_s]:
                results[worker.index], warnings = worker.result()
                for kind, message in warnings:
                    if kind not in warned:
                        log.warning("%s", message)
                        warned.add(kind)
                running.remove(worker)
                worker.end()
                done(worker.index, results[worker.index])
    finally:
        for worker in running:
            worker.end()
    return [results[index] for index in range(len(functions))]


def end_on_signals() -> None:
    """Let signals end this fork at once; what the parent does on them is the parent's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.SIG_DFL)


def _run(sender: Connection, function: Callable[[], object], parent: int) -> None:
    """Send what a function returns; log nothing, as several processes would mix their lines."""
    die_with_parent(parent)
    end_on_signals()
    warnings = _WarningsHandler()
    logging.getLogger().handlers = [warnings]
    if torch := sys.modules.get("torch"):  # planning loads it for few sharders
        torch.set_num_threads(1)  # threads of the parent are not there
    result: object
    try:
        result = function()
    except UserError as error:
        result = Refusal(str(error), isinstance(error, InfeasibleTaskError))
    except Exception as error:
        # a sharder of the user's may raise anything, and the others go on
        log.warning("%s", traceback.format_exc())
        result = Refusal(f"{type(error).__name__}: {error}")
    sender.send((result, tuple(warnings.messages)))


class _WarningsHandler(logging.Handler):
    """Keeps the warnings of this package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("dlrm_sharded"):
            self.messages.append((str(record.msg), record.getMessage()))
