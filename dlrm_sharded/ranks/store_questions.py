"""Asks a store that may not be reached: it then never answers, and Python hears no signal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

QUESTION_S = 5.0
"""Time in which the store of several hosts answers the agent of one."""


class StoreQuestions:
    """Asks in a thread, one question at a time, and waits for a limited time.

    Args:
        limit_s: time for one answer.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._thread: threading.Thread | None = None

    def ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Return the answer, or `otherwise` if this or an earlier question is not answered.

        Raises:
            Exception: what the question raises.
        """
        if self._thread is not None and self._thread.is_alive():
            return otherwise
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(question())
            except Exception as error:
                errors.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._thread.join(self._limit_s)
        if errors:
            raise errors[0]
        return answers[0] if answers else otherwise
