"""Questions to a store that answers late, or not at all."""

import subprocess
import sys
import textwrap
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


SERVER = """
    import time
    import torch.distributed as dist
    from dlrm_sharded.ranks.process import die_with_parent

    die_with_parent()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    time.sleep(600)
"""

LATE_ANSWER = """
    import os, signal, subprocess, sys, time
    import torch.distributed as dist
    from dlrm_sharded.ranks.store_questions import StoreQuestions, end_despite_questions

    server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
    os.kill(server.pid, signal.SIGSTOP)
    os.waitpid(server.pid, os.WUNTRACED)  # returns when it has stopped
    assert StoreQuestions(0.5).ask(lambda: store.add("key", 0), None) is None

    class AnswerAtTheEnd:
        def __del__(self, kill=os.kill, sleep=time.sleep, pid=server.pid, go_on=signal.SIGCONT):
            kill(pid, go_on)
            sleep(1)  # without the lock, which the thread of the question then wants

    sys.modules["answer"] = AnswerAtTheEnd()
    end_despite_questions(3)
    sys.exit(3)
"""


def test_an_answer_at_the_end_of_the_process_does_not_change_its_exit_code():
    """Python aborted: the thread wanted its lock back, in C++ that cannot be unwound."""
    program = [sys.executable, "-c", textwrap.dedent(LATE_ANSWER), textwrap.dedent(SERVER)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr
