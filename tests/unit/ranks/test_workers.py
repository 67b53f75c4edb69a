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


def test_results_keep_their_order() -> None:
    done: dict[int, object] = {}
    found = in_processes(
        [lambda: 1, refused, broken, killed, lambda: 2],
        limit_s=LONG_S,
        num_workers=2,
        done=done.__setitem__,
    )
    assert found == [
        1,
        Refusal("no room", is_infeasible=True),
        Refusal("KeyError: 'bug'"),
        Refusal("its process ended with exit code -9"),
        2,
    ]
    assert [done[index] for index in range(5)] == found


def test_what_takes_too_long_is_ended() -> None:
    started = time.monotonic()
    found = in_processes([lambda: time.sleep(LONG_S), lambda: None], limit_s=2.0, num_workers=2)
    assert found[0] == Refusal("it takes more than 2 s")
    assert time.monotonic() - started < LONG_S


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert in_processes([warned, warned], limit_s=LONG_S, num_workers=1) == [3, 3]
    assert [record.getMessage() for record in caplog.records] == ["assumed"]


def test_nothing_to_do() -> None:
    assert in_processes([], limit_s=1.0, num_workers=4) == []
