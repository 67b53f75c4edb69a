"""A checkpoint in the background that finds out that the training cannot go on."""

import math
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from dlrm_sharded.checkpoint import storage
from dlrm_sharded.checkpoint.logical import LogicalTensor
from dlrm_sharded.files.errors import DivergenceError, UnsavedError
from dlrm_sharded.ranks.process import kept_signals
from dlrm_sharded.training import meeting
from dlrm_sharded.training.progress import Progress
from tests.unit.checkpoint.cases import STATE, checkpoints_of_run

TIMEOUT_S = 30.0


class Meetings:
    """Meetings on a clock of its own, at each of which a checkpoint is due."""

    def __init__(self, rank, monkeypatch, *, batch_s, meeting_s, first_s=0.0):
        self.now_s = 0.0
        self._batch_s, self._meeting_s, self._wait_s = batch_s, meeting_s, first_s
        reduce = meeting.dist.all_reduce

        def all_reduce(*args, **options):
            self.now_s += self._wait_s + self._meeting_s
            self._wait_s = 0.0
            reduce(*args, **options)

        monkeypatch.setattr(meeting.dist, "all_reduce", all_reduce)
        monkeypatch.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self._ranks = meeting.Meeting(rank, every_s=0.0)

    def meets(self):
        self.now_s += self._batch_s
        return self._ranks.after_batch(may_save=True).saves


def test_ranks_meet_twice_a_second(rank, monkeypatch):
    ranks = Meetings(rank, monkeypatch, batch_s=0.125, meeting_s=0.0)
    assert [ranks.meets() for _ in range(9)] == [True, False, False, False] * 2 + [True]


@pytest.mark.parametrize(("meeting_s", "interval"), [(0.004, 16), (0.1, 40)])
def test_long_meetings_are_rare(meeting_s, interval, rank, monkeypatch):
    """The first one does not count, which waits for ranks that are late."""
    ranks = Meetings(rank, monkeypatch, batch_s=0.125, meeting_s=meeting_s, first_s=9.0)
    met = [number for number in range(3 * interval) if ranks.meets()]
    assert met[-1] - met[-2] == pytest.approx(interval, abs=1)


def test_the_end_waits_for_a_checkpoint_that_may_fail(tmp_path, rank, monkeypatch):
    """A signal ends a training, whose disk turns out to be full a moment later."""

    def fail(*args, **kwargs):
        time.sleep(0.2)
        raise OSError("No space left on device")

    monkeypatch.setattr(meeting, "INTERVAL_S", 0.0)  # ranks meet after every batch
    monkeypatch.setattr(storage, "write_durably", fail)
    checkpoints = checkpoints_of_run(tmp_path, rank, STATE, in_background=True, every_steps=100)

    def stop() -> None:
        with checkpoints:
            os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.after_step(1, is_complete=False, progress=lambda: Progress(step=1))

    with pytest.raises(UnsavedError, match="SIGTERM stopped the training after step 1, and no"):
        stop()


def test_a_divergence_ends_an_evaluation(tmp_path, rank, monkeypatch):
    """Of a model that is not finite, no batch more is worth its time."""
    monkeypatch.setattr(meeting, "INTERVAL_S", 0.0)  # ranks meet after every batch
    state = {**STATE, "dense.over.bias": LogicalTensor.whole(torch.tensor([1.5, math.nan]))}
    checkpoints = checkpoints_of_run(tmp_path, rank, state, in_background=True, every_steps=1)

    def evaluate() -> None:
        with checkpoints:
            checkpoints.after_step(1, is_complete=False, progress=lambda: Progress(step=1))
            ends_at = time.monotonic() + TIMEOUT_S
            while not checkpoints.stops_evaluation():
                assert time.monotonic() < ends_at, "the evaluation goes on"
                time.sleep(0.01)

    with pytest.raises(DivergenceError, match=r"of dense\.over\.bias are not finite"):
        evaluate()


@pytest.mark.parametrize("under_nohup", [False, True])
def test_a_closed_terminal_ends_a_training(under_nohup, rank):
    with kept_signals([signal.SIGHUP]):
        signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
        ranks = meeting.Meeting(rank, every_s=None)
        with ranks.signals():
            os.kill(os.getpid(), signal.SIGHUP)
            stop = ranks.after_batch(may_save=True).stop
    assert stop == (None if under_nohup else signal.SIGHUP)
