"""Runs functions in forks of this process, several at once, and ends those that take too long."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from dlrm_sharded.ranks.process import die_with_parent

log = logging.getLogger(__name__)


def in_forks(
    functions: Sequence[Callable[[], Any]], *, limit_s: float, num_forks: int
) -> Iterator[tuple[int, Any]]:
    """Yield the index of each function that has ended, and its result.

    Forks, unlike new processes, need not load torch for seconds. Warnings of all forks are logged
    here, and those that differ only in their figures once. If a fork has died, or has used up its
    time, the result is a text that says so.

    Args:
        functions: they must not raise.
        limit_s: time limit of one function.
        num_forks: number of forks at once.
    """
    context = multiprocessing.get_context("fork")
    warned: set[str] = set()
    left = list(enumerate(functions))[::-1]
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    while left or running:
        while left and len(running) < num_forks:
            index, function = left.pop()
            receiver, sender = context.Pipe(duplex=False)
            arguments = (sender, function, limit_s, os.getpid())
            fork = context.Process(target=_run, args=arguments, daemon=True)
            running[receiver] = index, fork
            fork.start()
            sender.close()
        ready = wait([*running])
        for receiver in [one for one in running if one in ready]:
            index, fork = running.pop(receiver)
            try:
                result, warnings = receiver.recv()
            except EOFError:
                fork.join()
                result, warnings = f"its process ended with exit code {fork.exitcode}", {}
                if fork.exitcode == -signal.SIGALRM:
                    result = f"it takes more than {limit_s:g} s"
            for kind in warnings.keys() - warned:
                log.warning("%s", warnings[kind])
            warned |= warnings.keys()
            yield index, result


def _run(sender: Connection, function: Callable[[], object], limit_s: float, parent: int) -> None:
    """Send what a function returns; log nothing, because several forks would mix their lines."""
    die_with_parent(parent)
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM ends this process
    os.setsid()  # Ctrl-C reaches only the parent, which ends its forks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logging.getLogger().handlers = [handler]
    if torch := sys.modules.get("torch"):  # planning loads it for few sharders
        torch.set_num_threads(1)  # a fork lacks the threads of its parent
    result = function()
    sender.send((result, {str(record.msg): record.getMessage() for record in records}))
