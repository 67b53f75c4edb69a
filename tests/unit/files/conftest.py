import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def ends_in_time() -> Iterator[None]:
    """A test that waits for ever, or nearly, fails."""

    def fail(number: int, frame: object) -> None:
        raise AssertionError("it did not end within two minutes")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
