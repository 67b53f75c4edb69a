"""Runs a function in a process of its own, which is killed when its time is over."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


class TooSlowError(Exception):
    """The function did not return in its time."""


def within(limit_s: float, function: Callable[[], T]) -> T:
    """Return what a function returns in a fork of this process.

    Raises:
        TooSlowError: it takes longer than the limit.
        RuntimeError: its process ended without a result.
    """
    context = multiprocessing.get_context("fork")  # a new process would load torch for seconds
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise TooSlowError
        found: T = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"its process ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    return found


def _send(sender: Connection, function: Callable[[], object]) -> None:
    sender.send(function())
