"""Functions in forks: results, reasons, warnings and limits of time."""

import logging
import os
import signal
import time

import pytest

from dlrm_sharded.contest.forks import in_forks

log = logging.getLogger("dlrm_sharded.test_forks")

LONG_S = 600.0


def killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def warned() -> int:
    log.warning("assumed")
    return 3


def ended(functions, limit_s=LONG_S, num_forks=2) -> list[object]:
    """The results, in the order of the functions."""
    found = dict(in_forks(functions, limit_s=limit_s, num_forks=num_forks))
    return [found[index] for index in range(len(functions))]


def test_results_and_reasons() -> None:
    found = ended([lambda: 1, killed, lambda: 2])
    assert found == [1, "its process ended with exit code -9", 2]


def test_what_takes_too_long_is_ended() -> None:
    started = time.monotonic()
    found = ended([lambda: time.sleep(LONG_S), lambda: None], limit_s=2.0)
    assert found[0] == "it takes more than 2 s"
    assert time.monotonic() - started < LONG_S


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ended([warned, warned], num_forks=1) == [3, 3]
    assert [record.getMessage() for record in caplog.records] == ["assumed"]


def test_nothing_to_do() -> None:
    assert ended([]) == []
