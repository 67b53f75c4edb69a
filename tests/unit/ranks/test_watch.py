"""When no step ends, the watch says after which time, which ranks report, and who is waited for."""

import socket
import threading
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dlrm_sharded.ranks import watch
from dlrm_sharded.ranks.store_questions import StoreQuestions
from dlrm_sharded.ranks.watch import Heartbeat, Report, Watch, place_of, stall_text
from tests.processes import wait_until

A2A = "in the all-to-all of ids"
SEVERAL_LOOKS_S = 0.3


def report(rank: int, collective: str | None = None, place: str = "in run (train.py)") -> Report:
    return Report(rank, f"h{rank // 2}", collective or place, collective is not None)


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([report(0, A2A), report(1, A2A)], f"waiting: ranks 0, 1 (h0) {A2A}"),
        (
            [report(0, A2A), report(2, "in barrier in run"), report(3, place="without an answer")],
            f"waiting: rank 0 (h0) {A2A}; rank 2 (h1) in barrier in run; waited for: rank 3 (h1) "
            "without an answer",
        ),
        ([report(0)], "rank 0 (h0) in run (train.py)"),
    ],
    ids=["all_in_one", "one_is_missing", "none_waits"],
)
def test_who_waits_for_whom(reports, said):
    assert stall_text(reports) == said


def waiting() -> None:
    """Be in a collective of the process group, when it fails."""
    dist.all_gather_object([], None)


def test_the_place_of_a_call():
    with pytest.raises(ValueError, match="process group") as raised:
        waiting()
    frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)][::-1]
    assert place_of(frames) == ("in all_gather_object in waiting", True)
    assert place_of(frames[-1:]) == ("in test_the_place_of_a_call (test_watch.py)", False)
    assert place_of([]) == ("in a library", False)


Start = Callable[[Callable[[], dist.Store]], Heartbeat]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Start:
    """Start the watch of rank 0 of two, which logs what it says; return its heartbeat."""
    for name in ("STALL_S", "ANSWER_S", "SAMPLE_S", "POLL_S"):
        monkeypatch.setattr(watch, name, 0.05)
    monkeypatch.setattr(watch, "STORE_S", 60)

    def start(connect_again: Callable[[], dist.Store]) -> Heartbeat:
        job: Any = SimpleNamespace(rank=0, world_size=2, timeout_s=600, connect_again=connect_again)
        made = Watch(Heartbeat(), job, speaks_for_host=True)
        made.start()
        request.addfinalizer(made.stop)
        return made.heartbeat

    return start


def store_of_two() -> dist.Store:
    store = dist.HashStore()
    store.set("host_1", "h1")
    return store


def test_a_stall_is_said_once_and_so_is_its_end(start, caplog):
    heartbeat = start(store_of_two)
    heartbeat.beat(7)
    wait_until(lambda: caplog.messages, "a line")
    time.sleep(SEVERAL_LOOKS_S)
    [line] = caplog.messages
    assert "after step 7, " in line
    assert "rank 1 (h1) without an answer; the run ends" in line
    heartbeat.beat(8)
    wait_until(lambda: "progress again" in caplog.text, "it goes on")


def test_no_stall_before_the_first_step_and_in_a_phase_without_steps(start, monkeypatch, caplog):
    heartbeat = start(store_of_two)
    time.sleep(SEVERAL_LOOKS_S)
    monkeypatch.setattr(watch, "STALL_S", 600)  # a slow machine may wait before it rests
    heartbeat.beat(1)
    with heartbeat.rest():
        monkeypatch.setattr(watch, "STALL_S", 0)
        time.sleep(SEVERAL_LOOKS_S)
        monkeypatch.setattr(watch, "STALL_S", 600)
    heartbeat.end()
    monkeypatch.setattr(watch, "STALL_S", 0)
    time.sleep(SEVERAL_LOOKS_S)
    assert not caplog.messages


def test_a_store_that_does_not_answer(start, monkeypatch, caplog):
    monkeypatch.setenv("MASTER_ADDR", "h0")
    monkeypatch.setattr(watch, "STORE_S", 0.05)
    never = threading.Event()

    def connect_again() -> dist.Store:
        never.wait(600)
        return dist.HashStore()

    start(connect_again).beat(3)
    wait_until(lambda: caplog.messages, "a line")
    never.set()
    assert f"rank 0 ({socket.gethostname()}) in " in caplog.text
    assert "cannot reach the job's store at h0:" in caplog.text


ERRORS = {
    "[/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv": (
        "a collective has timed out"
    ),
    "Application timeout caused pair closure": "a collective has timed out",
    "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20111": (
        "lost the connection to another rank in"
    ),
    "[/pytorch/gloo/transport/tcp/pair.cc:547] Read error: Connection reset by peer": (
        "lost the connection to another rank in"
    ),
    "timed out": None,
    "Connection reset by peer": None,
    "gloo: a bug": None,
}
"""What errors mean; those of a data file on a network are none of ranks."""


@pytest.mark.parametrize(("text", "meaning"), ERRORS.items(), ids=str)
def test_errors_of_collectives_are_told_apart(text, meaning, monkeypatch):
    for name in ("GRACE_S", "ANSWER_S"):
        monkeypatch.setattr(watch, name, 0)
    job: Any = SimpleNamespace(
        rank=0,
        world_size=2,
        timeout_s=20,
        reported_once=lambda error: error,
        connect_again=store_of_two,
    )
    made = Watch(Heartbeat(), job, speaks_for_host=True)
    explained = made.explain(RuntimeError(text))
    assert (explained and str(explained).startswith(meaning)) == (meaning and True)


def test_an_unanswered_question_is_the_last_one():
    """The store is one connection, on which a second question would wait for the first."""
    answer = threading.Event()
    questions = StoreQuestions(0.01)
    assert questions.ask(answer.wait, otherwise=False) is False
    assert questions.ask(lambda: True, otherwise=False) is False
    answer.set()
    wait_until(lambda: questions.ask(lambda: True, otherwise=False), "the next one is answered")
