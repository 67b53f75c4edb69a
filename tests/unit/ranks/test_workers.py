"""Functions in processes of their own: results, refusals, warnings and limits of time."""

import logging
import os
import signal
import time

import pytest

from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.ranks.workers import Refusal, in_processes

log = logging.getLogger("dlrm_sharded.test_workers")

LONG_S = 600.0


def refused() -> int:
    raise InfeasibleTaskError("no room")


def broken() -> int:
    raise KeyError("bug")


def killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def warned() -> int:
    log.warning("assumed")
    return 3


def ended(functions, limit_s=LONG_S, num_workers=2) -> list[object]:
    """The results, in the order of the functions."""
    found: dict[int, object] = {}
    in_processes(functions, limit_s=limit_s, num_workers=num_workers, done=found.__setitem__)
    return [found[index] for index in range(len(functions))]


def test_results_and_reasons() -> None:
    assert ended([lambda: 1, refused, broken, killed, lambda: 2]) == [
        1,
        Refusal("no room"),
        Refusal("KeyError: 'bug'"),
        Refusal("its process ended with exit code -9"),
        2,
    ]


def test_what_takes_too_long_is_ended() -> None:
    started = time.monotonic()
    found = ended([lambda: time.sleep(LONG_S), lambda: None], limit_s=2.0)
    assert found[0] == Refusal("it takes more than 2 s")
    assert time.monotonic() - started < LONG_S


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert ended([warned, warned], num_workers=1) == [3, 3]
    assert [record.getMessage() for record in caplog.records] == ["assumed"]


def test_nothing_to_do() -> None:
    assert ended([]) == []
