"""A sweep that is stopped ends the apps that it started."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def kept_signals() -> Iterator[Mapping[signal.Signals, Any]]:
    """What the block does with signals ends with it; gives the handlers of before.

    TorchX's local scheduler sets its own when it is made.
    """
    outer = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    try:
        yield outer
    finally:
        _set(outer)


def raise_on_signals(before: Mapping[signal.Signals, Any]) -> None:
    """So that Ctrl-C, a kill or a closed terminal still ends the apps that this process started.

    Args:
        before: handlers; a signal that was ignored, as by nohup, still is.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    wanted: dict[signal.Signals, Any] = dict.fromkeys(STOPPING_SIGNALS, end)
    wanted[signal.SIGINT] = signal.default_int_handler
    _set({n: signal.SIG_IGN if before[n] is signal.SIG_IGN else wanted[n] for n in wanted})


@contextmanager
def delayed_signals() -> Iterator[None]:
    """A signal that comes in the block is acted on at its end.

    Not by a mask, which the processes that are started here would inherit.
    """
    came: list[int] = []
    outer = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    _set(
        {
            number: handler if handler is signal.SIG_IGN else lambda n, _: came.append(n)
            for number, handler in outer.items()
        }
    )
    try:
        yield
    finally:
        _set(outer)
        for number in came[:1]:
            os.kill(os.getpid(), number)


def _set(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # Python's rule
        for number, handler in handlers.items():
            signal.signal(number, handler)
