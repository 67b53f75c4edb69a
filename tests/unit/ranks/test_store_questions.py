"""Questions to a store that answers late, or not at all."""

import threading

import pytest

from dlrm_sharded.ranks.store_questions import StoreQuestions


def test_an_unanswered_question_is_the_last_one():
    """The store is one connection, on which a second question would wait for the first."""
    answer = threading.Event()
    questions = StoreQuestions(0.01)
    assert questions.ask(answer.wait, otherwise=False) is False
    assert questions.ask(lambda: True, otherwise=False) is False
    answer.set()
    questions._thread.join()
    assert questions.ask(lambda: True, otherwise=False) is True


def test_what_a_question_raises_is_raised_here():
    def fail() -> None:
        raise RuntimeError("the store is gone")

    with pytest.raises(RuntimeError, match="gone"):
        StoreQuestions(60).ask(fail, None)
