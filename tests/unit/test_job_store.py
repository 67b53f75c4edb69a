"""Errors of collectives are told apart by what gloo and torch say."""

import pytest

from dlrm_sharded.job_store import CUT_OFF, HELD_OUT, OF_GLOO

TIMEOUTS = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
    "20000ms for recv operation to complete",
    "Application timeout caused pair closure",
]
LOSSES = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:20111",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error [127.0.0.1]:1: "
    "Connection reset by peer",
]


@pytest.mark.parametrize("text", TIMEOUTS)
def test_timeouts(text: str) -> None:
    assert OF_GLOO.search(text)
    assert HELD_OUT.search(text)


@pytest.mark.parametrize("text", LOSSES)
def test_lost_connections(text: str) -> None:
    assert OF_GLOO.search(text)
    assert CUT_OFF.search(text)
    assert not HELD_OUT.search(text)


@pytest.mark.parametrize("text", ["timed out", "Connection reset by peer", "a bug"])
def test_errors_of_others(text: str) -> None:
    """Such as those of a data file on a network."""
    assert not OF_GLOO.search(text)
