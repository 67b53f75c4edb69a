"""Wrong inputs of every kind end with one message or a right answer.

`--hypothesis-profile=soak` tries many more, and others each time. What they find becomes a test of
its own where the input is read.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlrm_sharded.files.errors import ConfigError
from tests.soak import input_kinds as kinds

NAMES = ("overrides", "task", "plan", "criteo", "artifact", "blocks", "journal", "checkpoint")
SLOW = {"overrides": 5}
"""One example of these kinds takes as long as so many of another one."""


def test_every_kind_is_tried():
    assert set(kinds.KINDS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_inputs(name):
    kind = kinds.KINDS[name]

    @settings(
        max_examples=settings.default.max_examples // SLOW.get(name, 1),
        derandomize=settings.get_current_profile_name() != "soak",
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def try_one(data: st.DataObject) -> None:
        value = data.draw(kind.inputs())
        found = kinds.outcome(kind, value)
        assert found.name in kinds.GOOD, f"{value!r:.2000}\n{found.text}"

    try_one()


def refuse(value: object, folder: Path) -> None:
    raise ConfigError(value)


def fail(value: object, folder: Path) -> None:
    raise KeyError(value)


def wait(value: object, folder: Path) -> None:
    signal.pause()  # until the limit's own signal


def accept(value: object, folder: Path) -> None:
    assert not list(folder.iterdir())


def test_the_outcomes_are_told_apart():
    def name(read: Callable[[object, Path], None], **options: float) -> str:
        kind = kinds.Kind(st.nothing, read, **options)
        found: str = kinds.outcome(kind, "many words " * 10_000).name
        return found

    assert name(refuse) == kinds.CLEAR
    assert name(fail) == kinds.TRACEBACK
    assert name(wait, limit_s=0.1) == kinds.HANG
    assert name(accept) == kinds.RIGHT
