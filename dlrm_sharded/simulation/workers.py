"""Runs functions in processes of their own, several at once, and ends those that take too long."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from dlrm_sharded.files.errors import InfeasibleTaskError, UserError

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a function has no result: an error's message, or that its time was over.

    Args:
        is_infeasible: whether the error says that no plan fits.
    """

    message: str
    is_infeasible: bool = False


@dataclass(frozen=True, slots=True)
class _Running:
    index: int
    process: BaseProcess
    ends: float


def in_processes(
    functions: Sequence[Callable[[], T]],
    *,
    limit_s: float,
    num_workers: int,
    done: Callable[[int], None] = lambda index: None,
) -> list[T | Refusal]:
    """Return what functions return, each in a fork of this process, or why it does not.

    Warnings of all processes are logged here, each one once.

    Args:
        limit_s: time of one function.
        num_workers: number of processes at once.
        done: called with the index of each function that has ended.
    """
    results: dict[int, T | Refusal] = {}
    warned: set[str] = set()
    running: dict[Connection, _Running] = {}
    waiting = list(enumerate(functions))[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                receiver, started = _start(*waiting.pop(), limit_s)
                running[receiver] = started
            next_end = min(worker.ends for worker in running.values())
            ready = wait(list(running), timeout=max(0.0, next_end - time.monotonic()))
            for receiver, worker in list(running.items()):
                if receiver not in ready and time.monotonic() < worker.ends:
                    continue
                result = Refusal(f"it takes more than {limit_s:g} s")
                if receiver in ready:
                    result, warnings = _received(receiver, worker.process)
                    for warning in warnings:
                        if warning not in warned:
                            log.warning("%s", warning)
                    warned.update(warnings)
                results[worker.index] = result
                _end(receiver, running.pop(receiver).process)
                done(worker.index)
    finally:
        for receiver, worker in running.items():
            _end(receiver, worker.process)
    return [results[index] for index in range(len(functions))]


def _start(
    index: int, function: Callable[[], object], limit_s: float
) -> tuple[Connection, _Running]:
    context = multiprocessing.get_context("fork")  # a new process would load torch for seconds
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function), daemon=True)
    process.start()
    sender.close()
    return receiver, _Running(index, process, time.monotonic() + limit_s)


def _end(receiver: Connection, process: BaseProcess) -> None:
    process.kill()
    process.join()
    receiver.close()


def _received(receiver: Connection, process: BaseProcess) -> tuple[Any, tuple[str, ...]]:
    """Return the result of a function and its warnings, or why its process sent none."""
    try:
        received: tuple[Any, tuple[str, ...]] = receiver.recv()
    except EOFError:
        process.join()
        return Refusal(f"its process ended with exit code {process.exitcode}"), ()
    return received


def end_on_signals() -> None:
    """Let signals end this fork at once; what the parent does on them is the parent's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _run(sender: Connection, function: Callable[[], object]) -> None:
    """Send what a function returns; log nothing, as several processes would mix their lines."""
    end_on_signals()
    warnings = _Warnings()
    logging.getLogger().handlers = [warnings]
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


class _Warnings(logging.Handler):
    """Keeps the warnings of this package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("dlrm_sharded"):
            self.messages.append(record.getMessage())
