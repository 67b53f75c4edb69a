"""What is said when no step ends: after which time, by whom, and of whom."""

import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from dlrm_sharded.ranks import flight_recorder, step_watch
from dlrm_sharded.ranks.heartbeat import Heartbeat
from dlrm_sharded.ranks.step_watch import Report, StepWatch, stall_text
from tests.processes import wait_until

A2A = "in the all-to-all of ids"
SEVERAL_LOOKS_S = 0.3
ELSEWHERE = {"place": "in read (rows.py)"}
MISSING = {"place": "without an answer"}


def report(rank: int, collective: str | None = None, **others) -> Report:
    return Report(rank, f"h{rank // 2}", collective, **{"place": "in run (train.py)", **others})


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([report(0, A2A), report(1, A2A)], f"all ranks wait {A2A}, and nothing moves"),
        (
            [report(0, A2A), report(1, A2A), report(2, **MISSING)],
            f"waiting: ranks 0, 1 on h0 {A2A}; waited for: rank 2 on h1 without an answer",
        ),
        (
            [report(0, A2A), report(3, **ELSEWHERE)],
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


Watch = Callable[..., tuple[Heartbeat, list[tuple[float, int, str]]]]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Watch:
    """Start the watch of rank 0 of two; return its heartbeat, and what it tells of stalls."""
    for name in ("STALL_S", "ANSWER_S", "SAMPLE_S", "POLL_S"):
        monkeypatch.setattr(step_watch, name, 0.05)
    monkeypatch.setattr(step_watch, "STORE_S", 60)

    def start(store: dist.Store, connect: Callable[[], dist.Store] | None = None):
        heartbeat = Heartbeat()
        told: list[tuple[float, int, str]] = []
        store.set("process_1", "h1 5 6")
        made = StepWatch(
            heartbeat=heartbeat,
            rank=0,
            world_size=2,
            speaks_for_host=True,
            connect=connect or (lambda: store),
            pending=lambda: None,
            end_text="the run ends",
        )
        made.start()
        request.addfinalizer(made.stop)
        heartbeat.on_stall = lambda *stall: told.append(stall)
        return heartbeat, told

    return start


def test_intervals_double_until_a_step_ends(watch, caplog):
    heartbeat, told = watch(dist.HashStore())
    heartbeat.beat(7)
    wait_until(lambda: len(told) == 3, "three lines")
    (first_s, step, line), _, (third_s, _, _) = told
    assert step == 7
    assert third_s >= 4 * step_watch.STALL_S > step_watch.STALL_S
    assert third_s > first_s
    assert "after step 7, " in line
    assert "rank 1 on h1 without an answer; the run ends" in line
    heartbeat.beat(8)
    wait_until(lambda: "progress again" in caplog.text, "it goes on")


def test_no_stall_before_the_first_step_and_in_a_phase_without_steps(watch, monkeypatch):
    heartbeat, told = watch(dist.HashStore())
    with heartbeat.steps(lambda *stall: told.append(stall)):
        time.sleep(SEVERAL_LOOKS_S)
        monkeypatch.setattr(step_watch, "STALL_S", 600)  # a slow machine may wait before it rests
        heartbeat.beat(1)
        with heartbeat.rest():
            monkeypatch.setattr(step_watch, "STALL_S", 0)
            time.sleep(SEVERAL_LOOKS_S)
            monkeypatch.setattr(step_watch, "STALL_S", 600)
    monkeypatch.setattr(step_watch, "STALL_S", 0)
    time.sleep(SEVERAL_LOOKS_S)
    assert not told


def test_a_store_that_does_not_answer(watch, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "h0")
    monkeypatch.setattr(step_watch, "STORE_S", 0.05)
    never = threading.Event()

    def connect() -> dist.Store:
        never.wait(600)
        return dist.HashStore()

    heartbeat, told = watch(dist.HashStore(), connect)
    heartbeat.beat(3)
    wait_until(lambda: told, "a line")
    never.set()
    assert f"rank 0 on {socket.gethostname()} is in " in told[0][2]
    assert "cannot reach the job's store at h0:" in told[0][2]


def test_the_flight_recorder_is_armed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (flight_recorder.FILE_VARIABLE, *flight_recorder.SETTINGS):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    assert not flight_recorder.reading_text()
    flight_recorder.arm("a job")
    (folder,) = (tmp_path / "runs").iterdir()
    text = flight_recorder.reading_text()
    assert f"writes {folder}/" in text
    prefix = text.split()[-2]
    assert text.endswith(f"torchfrtrace -p {prefix} {folder}")
    assert prefix.endswith("_rank_")


def test_the_oldest_collective_that_nccl_has_not_completed(monkeypatch):
    from torch._C import _distributed_c10d

    entries = """{"entries": [
        {"state": "completed", "profiling_name": "nccl:all_reduce", "collective_seq_id": 6},
        {"state": "started", "profiling_name": "nccl:all_to_all", "collective_seq_id": 7}]}"""
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", lambda **_: entries, raising=False
    )
    assert flight_recorder.pending_collective() == "NCCL's all_to_all, number 7 of its group"
    monkeypatch.delattr(_distributed_c10d, "_dump_nccl_trace_json")
    assert flight_recorder.pending_collective() is None
