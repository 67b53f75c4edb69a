"""The watch on a main thread that waits in a collective."""

from types import SimpleNamespace

from dlrm_sharded.ranks import stall_watch
from dlrm_sharded.ranks.stall_watch import StallWatch
from tests.processes import wait_until


def test_never_walks_the_stack_of_a_thread_that_runs(monkeypatch):
    """Its frames may go while they are read, which ended a job with SIGSEGV."""
    looks, walks = list[None](), list[object]()
    group = SimpleNamespace(_get_sequence_number_for_group=lambda: looks.append(None) or len(looks))
    monkeypatch.setattr(stall_watch, "SAMPLE_S", 0.001)
    monkeypatch.setattr(stall_watch.dist, "group", SimpleNamespace(WORLD=group))
    monkeypatch.setattr(stall_watch, "frames_of", lambda frame: walks.append(frame) or [])
    watch = StallWatch(0.0, walks.append)
    watch.start()
    wait_until(lambda: len(looks) > 40, "the watch has looked")
    watch.stop()
    assert not walks
