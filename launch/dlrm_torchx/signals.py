"""A sweep that is stopped ends the apps that it started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def kept_signals() -> Iterator[None]:
    """What the block does with signals ends with it; TorchX's local scheduler sets its handlers."""
    outer = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in outer.items():
                signal.signal(number, handler)


def raise_on_signals() -> None:
    """So that Ctrl-C, a kill or a closed terminal still ends the apps that this process started."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in STOPPING_SIGNALS:
            signal.signal(number, end)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def no_signals() -> Iterator[None]:
    """Nothing interrupts the block: its work is short, and what it ends must be ended."""
    outer = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, outer)
