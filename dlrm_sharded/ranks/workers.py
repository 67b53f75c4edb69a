"""Runs functions in processes of their own, several at once, and ends those that take too long."""

from __future__ import annotations

import dataclasses
import logging
import logging.handlers
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar

from dlrm_sharded.files.errors import UserError
from dlrm_sharded.ranks.process import die_with_parent

T = TypeVar("T")

MAX_RECORDS = 10_000
"""Warnings that a process keeps."""

Warnings = list[tuple[str, str]]
"""The text of each warning, without its figures and with them."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a function has no result: an error's message, or that its time was over.

    Args:
        seconds: time until this was known.
    """

    message: str
    seconds: float = field(default=0.0, compare=False)


def in_processes(
    functions: Sequence[Callable[[], T]],
    *,
    limit_s: float,
    num_workers: int,
    done: Callable[[int, T | Refusal], None],
) -> None:
    """Run functions, each in a fork of this process: a new one would load torch for seconds.

    Warnings of all processes are logged here, and those that differ only in their figures once.

    Args:
        limit_s: time of one function.
        num_workers: number of processes at once.
        done: called with the index of each function that has ended, and with its result, or why it
            has none.
    """
    context = multiprocessing.get_context("fork")
    warned: set[str] = set()
    waiting = list(enumerate(functions))[::-1]
    running: dict[Connection, tuple[int, ForkProcess, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                index, function = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run, args=(sender, function, os.getpid()), daemon=True
                )
                running[receiver] = index, process, time.monotonic()
                process.start()
                sender.close()
            first_s = min(began_s for _, _, began_s in running.values())
            ready = wait([*running], timeout=max(0.0, first_s + limit_s - time.monotonic()))
            now_s = time.monotonic()
            for receiver, (index, process, began_s) in [*running.items()]:
                seconds = now_s - began_s
                if receiver in ready:
                    result, warnings = _received(receiver, process)
                elif seconds >= limit_s:
                    result, warnings = Refusal(f"it takes more than {limit_s:g} s"), []
                else:
                    continue
                for kind, message in warnings:
                    if kind not in warned:
                        log.warning("%s", message)
                        warned.add(kind)
                del running[receiver]
                _end(receiver, process)
                is_refused = isinstance(result, Refusal)
                done(index, dataclasses.replace(result, seconds=seconds) if is_refused else result)
    finally:
        for receiver, (_, process, _) in running.items():
            _end(receiver, process)


def _received(receiver: Connection, process: ForkProcess) -> tuple[Any, Warnings]:
    try:
        received: tuple[Any, Warnings] = receiver.recv()
    except EOFError:
        process.join()
        return Refusal(f"its process ended with exit code {process.exitcode}"), []
    return received


def _end(receiver: Connection, process: ForkProcess) -> None:
    process.kill()
    process.join()
    receiver.close()


def end_on_signals() -> None:
    """Let signals end this fork at once; what the parent does on them is the parent's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.SIG_DFL)


def _run(sender: Connection, function: Callable[[], object], parent: int) -> None:
    """Send what a function returns; log nothing, as several processes would mix their lines."""
    die_with_parent(parent)
    end_on_signals()
    handler = logging.handlers.BufferingHandler(MAX_RECORDS)
    handler.setLevel(logging.WARNING)
    logging.getLogger().handlers = [handler]
    if torch := sys.modules.get("torch"):  # planning loads it for few sharders
        torch.set_num_threads(1)  # threads of the parent are not there
    result: object
    try:
        result = function()
    except UserError as error:
        result = Refusal(str(error))
    except Exception as error:
        # a sharder of the user's may raise anything, and the others go on
        log.warning("%s", traceback.format_exc())
        result = Refusal(f"{type(error).__name__}: {error}")
    ours = [record for record in handler.buffer if record.name.startswith("dlrm_sharded")]
    sender.send((result, [(str(record.msg), record.getMessage()) for record in ours]))
