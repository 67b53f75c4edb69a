"""The watch on a main thread that waits in a collective."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from dlrm_sharded.ranks import stall_watch
from dlrm_sharded.ranks.stall_watch import StallWatch


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Names to find in the stack of the main thread, one for each walk of it."""
    names: list[str | None] = []
    world = SimpleNamespace(_get_sequence_number_for_group=lambda: 1)
    monkeypatch.setattr(stall_watch, "SAMPLE_S", 0.01)
    monkeypatch.setattr(stall_watch.dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(stall_watch, "frames_of", lambda frame: [])
    monkeypatch.setattr(stall_watch, "name_of_frames", lambda frames: names.pop(0))
    return names


def test_names_the_collective_of_a_thread_that_stays(walks: list[str | None]) -> None:
    """A long call outside of collectives is no stall."""
    walks += [None, "the all-to-all"]
    told, called = threading.Event(), list[str]()

    def on_stall(name: str) -> None:
        called.append(name)
        told.set()

    watch = StallWatch(0.05, on_stall)
    watch.start()
    assert told.wait(60.0)
    watch.stop()
    assert (called, walks) == (["the all-to-all"], [])


def test_never_walks_the_stack_of_a_thread_that_moves(
    walks: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames may go while they are read, which ended a job with SIGSEGV."""
    numbers = itertools.count()
    world = SimpleNamespace(_get_sequence_number_for_group=lambda: next(numbers))
    monkeypatch.setattr(stall_watch.dist, "group", SimpleNamespace(WORLD=world))
    walks += ["a collective"] * 1000
    watch = StallWatch(0.05, lambda name: None)
    watch.start()
    while next(numbers) < 40:
        time.sleep(0.01)
    watch.stop()
    assert len(walks) == 1000
