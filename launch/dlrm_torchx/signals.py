"""Signal handling that lets a stopped sweep cancel the apps it started."""

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
    """Restore the signal handlers after the block, which is given the handlers from before it.

    TorchX's local scheduler sets handlers of its own when it is created.
    """
    outer = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    try:
        yield outer
    finally:
        _set(outer)


def raise_on_signals(before: Mapping[signal.Signals, Any]) -> None:
    """Turn Ctrl-C, a kill and a closed terminal into exceptions, so that clean-up code runs.

    Args:
        before: earlier handlers; a signal that was ignored, as under nohup, stays ignored.
    """

    def exit_process(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    handlers: dict[signal.Signals, Any] = dict.fromkeys(STOPPING_SIGNALS, exit_process)
    handlers[signal.SIGINT] = signal.default_int_handler
    _set({n: signal.SIG_IGN if before[n] is signal.SIG_IGN else handlers[n] for n in handlers})


@contextmanager
def delayed_signals() -> Iterator[None]:
    """Deliver a signal that arrives in the block at its end.

    A signal mask would be simpler, but processes that are started in the block would inherit it.
    """
    arrived: list[int] = []
    outer = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    _set(
        {
            number: handler if handler is signal.SIG_IGN else lambda n, _: arrived.append(n)
            for number, handler in outer.items()
        }
    )
    try:
        yield
    finally:
        _set(outer)
        for number in arrived[:1]:
            os.kill(os.getpid(), number)


def _set(handlers: Mapping[signal.Signals, Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # Python's rule
        for number, handler in handlers.items():
            signal.signal(number, handler)
