"""Ranks of a host compute beside each other, and end when the measurement does."""

import multiprocessing
import os
import signal

import pytest

from dlrm_sharded.simulation.neighbors import busy_neighbors


@pytest.mark.parametrize("count", [0, 2])
def test_neighbors_live_as_long_as_the_block(count):
    before = multiprocessing.active_children()
    with busy_neighbors(count):
        living = [p for p in multiprocessing.active_children() if p not in before]
        assert len(living) == count
        assert all(process.is_alive() for process in living)
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_neighbor_without_a_word(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, lambda *_: 1 / 0)  # as a command has its own
    try:
        with busy_neighbors(1):
            [neighbor] = multiprocessing.active_children()
            os.kill(neighbor.pid, number)
            neighbor.join()
            assert neighbor.exitcode == -number
    finally:
        signal.signal(number, before)
    assert capfd.readouterr().err == ""


def test_neighbors_end_when_the_measurement_fails():
    with pytest.raises(ZeroDivisionError), busy_neighbors(1):
        1 / 0  # noqa: B018
    assert not multiprocessing.active_children()
