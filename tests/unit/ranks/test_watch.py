"""When no step ends, the watch says after which time, which ranks report, and who is waited for."""

import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dlrm_sharded.ranks import watch
from dlrm_sharded.ranks.store_questions import StoreQuestions
from dlrm_sharded.ranks.watch import Heartbeat, Report, Watch, pending_collective, stall_text
from tests.processes import wait_until

A2A = "in the all-to-all of ids"
SEVERAL_LOOKS_S = 0.3


def report(rank: int, collective: str | None = None, place: str = "in run (train.py)") -> Report:
    return Report(rank, f"h{rank // 2}", collective or place, collective is not None)


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([report(0, A2A), report(1, A2A)], f"all ranks wait {A2A}, and nothing moves"),
        (
            [report(0, A2A), report(1, A2A), report(2, place="without an answer")],
            f"waiting: ranks 0, 1 on h0 {A2A}; waited for: rank 2 on h1 without an answer",
        ),
        (
            [report(0, A2A), report(3, place="in read (rows.py)")],
            f"waiting: rank 0 on h0 {A2A}; waited for: rank 3 on h1 in read (rows.py)",
        ),
        (
            [report(0, A2A), report(2, "in barrier in run")],
            f"waiting: rank 0 on h0 {A2A}; rank 2 on h1 in barrier in run",
        ),
        ([report(0)], "waiting: no rank; waited for: rank 0 on h0 in run (train.py)"),
    ],
    ids=["all_in_one", "one_is_missing", "one_is_elsewhere", "in_two_collectives", "none_waits"],
)
def test_who_waits_for_whom(reports, said):
    assert stall_text(reports).startswith(said)


Start = Callable[..., tuple[Heartbeat, list[tuple[float, int, str]]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Start:
    """Start the watch of rank 0 of two; return its heartbeat, and what it tells of stalls."""
    for name in ("STALL_S", "ANSWER_S", "SAMPLE_S", "POLL_S"):
        monkeypatch.setattr(watch, name, 0.05)
    monkeypatch.setattr(watch, "STORE_S", 60)

    def start(connect_again: Callable[[], dist.Store]) -> Any:
        heartbeat = Heartbeat()
        told: list[tuple[float, int, str]] = []
        job: Any = SimpleNamespace(
            rank=0, world_size=2, timeout_s=600, group_timeout_s=590, connect_again=connect_again
        )
        made = Watch(heartbeat=heartbeat, job=job, speaks_for_host=True, on_cuda=False)
        made.start()
        request.addfinalizer(made.stop)
        heartbeat.on_stall = lambda *stall: told.append(stall)
        return heartbeat, told

    return start


def store_of_two() -> dist.Store:
    store = dist.HashStore()
    store.set("host_1", "h1")
    return store


def test_intervals_double_until_a_step_ends(start, caplog):
    heartbeat, told = start(store_of_two)
    heartbeat.beat(7)
    wait_until(lambda: len(told) == 3, "three lines")
    (first_s, step, line), _, (third_s, _, _) = told
    assert step == 7
    assert third_s >= 4 * watch.STALL_S > watch.STALL_S
    assert third_s > first_s
    assert "after step 7, " in line
    assert "rank 1 on h1 without an answer; the run ends" in line
    heartbeat.beat(8)
    wait_until(lambda: "progress again" in caplog.text, "it goes on")


def test_no_stall_before_the_first_step_and_in_a_phase_without_steps(start, monkeypatch):
    heartbeat, told = start(store_of_two)
    with heartbeat.steps(lambda *stall: told.append(stall)):
        time.sleep(SEVERAL_LOOKS_S)
        monkeypatch.setattr(watch, "STALL_S", 600)  # a slow machine may wait before it rests
        heartbeat.beat(1)
        with heartbeat.rest():
            monkeypatch.setattr(watch, "STALL_S", 0)
            time.sleep(SEVERAL_LOOKS_S)
            monkeypatch.setattr(watch, "STALL_S", 600)
    monkeypatch.setattr(watch, "STALL_S", 0)
    time.sleep(SEVERAL_LOOKS_S)
    assert not told


def test_a_store_that_does_not_answer(start, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "h0")
    monkeypatch.setattr(watch, "STORE_S", 0.05)
    never = threading.Event()

    def connect_again() -> dist.Store:
        never.wait(600)
        return dist.HashStore()

    heartbeat, told = start(connect_again)
    heartbeat.beat(3)
    wait_until(lambda: told, "a line")
    never.set()
    assert f"rank 0 on {socket.gethostname()} in " in told[0][2]
    assert "cannot reach the job's store at h0:" in told[0][2]


ERRORS = {
    "[/pytorch/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv": (
        "a collective has timed out"
    ),
    "Application timeout caused pair closure": "a collective has timed out",
    "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20111": (
        "lost the connection to another rank in a collective"
    ),
    "[/pytorch/gloo/transport/tcp/pair.cc:547] Read error: Connection reset by peer": (
        "lost the connection to another rank in a collective"
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
    made = Watch(heartbeat=Heartbeat(), job=job, speaks_for_host=True, on_cuda=False)
    explained = made.explain(RuntimeError(text))
    assert (explained and str(explained).startswith(meaning)) == (meaning and True)


def test_the_oldest_collective_that_nccl_has_not_completed(monkeypatch):
    from torch._C import _distributed_c10d

    entries = """{"entries": [
        {"state": "completed", "profiling_name": "nccl:all_reduce", "collective_seq_id": 6},
        {"state": "started", "profiling_name": "nccl:all_to_all", "collective_seq_id": 7}]}"""
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", lambda **_: entries, raising=False
    )
    assert pending_collective() == "NCCL's all_to_all, number 7 of its group"
    monkeypatch.delattr(_distributed_c10d, "_dump_nccl_trace_json")
    assert pending_collective() is None


def test_an_unanswered_question_is_the_last_one():
    """The store is one connection, on which a second question would wait for the first."""
    answer = threading.Event()
    questions = StoreQuestions(0.01)
    assert questions.ask(answer.wait, otherwise=False) is False
    assert questions.ask(lambda: True, otherwise=False) is False
    answer.set()
    wait_until(lambda: questions.ask(lambda: True, otherwise=False), "the next one is answered")
