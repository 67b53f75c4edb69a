"""Wrong inputs of every kind end with one message or a right answer, which their readers assert.

`--hypothesis-profile=soak` tries many more, and others each time. What they find becomes a test of
its own where the input is read.
"""

import signal
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlrm_sharded.commands.messages import MAX_MESSAGE, readable_message
from tests.soak import input_readers as readers

MAX_SHOWN = MAX_MESSAGE + 200
"""Longest message that counts as clear, with its notes on what was left out."""

LIMIT_S = 60.0
"""Time after which reading counts as a hang."""

KINDS = {
    "overrides": (readers.overrides, readers.read_overrides),
    "task": (readers.tasks, readers.read_task_file),
    "plan": (readers.plans, readers.read_plan_file),
    "criteo": (readers.criteo_files, readers.read_criteo),
    "artifact": (readers.artifacts, readers.read_artifact_file),
}
SLOW = {"overrides": 5}
"""One example of these kinds takes as long as so many of another one."""


class Hang(BaseException):
    """Reading takes too long. It is no Exception, so that no reader handles it."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise Hang in the block after this time."""

    def raise_hang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, raise_hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", KINDS)
def test_wrong_inputs(name):
    inputs, read = KINDS[name]

    @settings(
        max_examples=settings.default.max_examples // SLOW.get(name, 1),
        derandomize=settings.get_current_profile_name() != "soak",
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        value = data.draw(inputs())
        with (
            tempfile.TemporaryDirectory() as folder,
            limit(LIMIT_S),
            warnings.catch_warnings(action="ignore"),
        ):
            try:
                read(value, Path(folder))
            except Exception as error:
                message = readable_message(error)
                if not message or len(message) > MAX_SHOWN:
                    pytest.fail(f"{value!r:.2000}\n{traceback.format_exc()}")

    try_one()
