"""Queries a store that may be unreachable, which would block forever, without handling signals.

A connection that breaks and comes back answers late. Before Python 3.14, an answer that arrives
while the interpreter exits aborts the process: its thread can neither get the lock nor unwind
through C++. The interpreter's exit also waits for a group that was not left.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

QUESTION_S = 5.0
"""Time limit for the answer of the hosts' common store to an agent."""

THREAD_NAME = "question to a store"


def end_despite_questions(code: int) -> None:
    """Make this process end with this exit code even if a question is unanswered at its exit.

    It then does not wait for a process group that it has not left, either.
    """
    atexit.register(_end_if_unanswered, code)


def _end_if_unanswered(code: int) -> None:
    distributed = sys.modules.get("torch.distributed")
    has_group = distributed is not None and distributed.is_initialized()
    if has_group or any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class StoreQuestions:
    """Asks questions in a thread, one at a time, and waits for a limited time.

    Args:
        limit_s: time limit for an answer.
        gone: errors that mean that the store is gone; they count as no answer.
    """

    def __init__(self, limit_s: float, *gone: type[Exception]) -> None:
        self._limit_s = limit_s
        self._gone = gone
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Return the answer, or `otherwise` if this or an earlier question is not answered.

        Raises:
            Exception: any other error of the question.
        """
        if self._thread is not None and self._thread.is_alive():
            return otherwise
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._thread = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
        self._thread.start()
        self._thread.join(self._limit_s)
        try:
            return answer.result() if answer.done() else otherwise
        except self._gone:
            return otherwise
