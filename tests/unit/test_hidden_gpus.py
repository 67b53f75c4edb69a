"""Tests hide GPUs from themselves, and those that need them find out which were given."""

import pytest

from tests.hidden_gpus import GIVEN, VARIABLE, environment_with_gpus, hide


@pytest.mark.parametrize("given", [None, "", "2,3"])
def test_workers_know_what_the_process_that_began_them_was_given(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv(GIVEN, raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    for _ in ("the first process", "a worker, which finds them hidden"):
        hide()
    assert environment_with_gpus().get(VARIABLE) == given
