"""Signal handlers that let a stopped sweep cancel the apps it started."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dlrm_sharded.ranks.process import kept_signals, set_handlers

STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def raise_on_signals(before: Mapping[signal.Signals, Any]) -> None:
    """Turn Ctrl-C, SIGTERM and a closed terminal into exceptions, so that clean-up code runs.

    Args:
        before: earlier handlers; a signal that was ignored, as under nohup, stays ignored.
    """

    def exit_process(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    handlers: dict[signal.Signals, Any] = dict.fromkeys(STOPPING_SIGNALS, exit_process)
    handlers[signal.SIGINT] = signal.default_int_handler
    set_handlers(
        {n: signal.SIG_IGN if before[n] is signal.SIG_IGN else handlers[n] for n in handlers}
    )


@contextmanager
def delayed_signals() -> Iterator[None]:
    """Delay signals that arrive in the block to its end; only the first one is delivered.

    A signal mask would be simpler, but processes that are started in the block would inherit it.
    """
    arrived: list[int] = []

    def delay(number: int, frame: object) -> None:
        arrived.append(number)

    try:
        with kept_signals(STOPPING_SIGNALS) as outer:
            set_handlers({n: h if h is signal.SIG_IGN else delay for n, h in outer.items()})
            yield
    finally:
        for number in arrived[:1]:
            os.kill(os.getpid(), number)
