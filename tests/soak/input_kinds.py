"""Kinds of input that users give, with wrong ones of each, and what reads them.

A kind draws inputs near valid ones and reads them as a command does. The result is a right answer,
which the reader checks with assertions, or an error that is one message.
"""

from __future__ import annotations

import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dlrm_sharded.commands.messages import MAX_MESSAGE, readable_message
from tests.soak import input_readers as readers

MAX_SHOWN = MAX_MESSAGE + 200
"""Longest message that counts as clear, with its notes on what was left out."""

RIGHT, CLEAR, TRACEBACK, HANG = "right answer", "clear error", "traceback", "hang"
GOOD = (RIGHT, CLEAR)


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Args:
        inputs: returns the strategy that draws them; it may read files.
        read: reads one with an empty folder at hand; raises an error, or AssertionError if what
            was read is wrong.
        limit_s: time after which reading counts as a hang.
    """

    inputs: Callable[[], st.SearchStrategy[Any]]
    read: Callable[[Any, Path], None]
    limit_s: float = 60.0


KINDS: dict[str, Kind] = {
    "overrides": Kind(readers.overrides, readers.read_overrides),
    "task": Kind(readers.tasks, readers.read_task_file),
    "plan": Kind(readers.plans, readers.read_plan_file),
    "criteo": Kind(readers.criteo_files, readers.read_criteo),
    "artifact": Kind(readers.artifacts, readers.read_artifact_file),
    "blocks": Kind(readers.block_folders, readers.read_blocks),
    # Another kind of input is a line here, and two functions in `readers`.
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of reading an input: one of the four, and the message or the traceback."""

    name: str
    text: str = ""


class Hang(BaseException):
    """Reading takes too long. It is no Exception, so that no reader handles it."""


def outcome(kind: Kind, value: Any) -> Outcome:
    """Read an input in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="bad_input_") as folder, _limit(kind.limit_s):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kind.read(value, Path(folder))
        except Hang:
            return Outcome(HANG, traceback.format_exc())
        except Exception as error:
            message = readable_message(error)
            if message and len(message) <= MAX_SHOWN:
                return Outcome(CLEAR, message)
            return Outcome(TRACEBACK, message or traceback.format_exc())
    return Outcome(RIGHT)


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise Hang in the block after this time."""

    def raise_hang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, raise_hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
