"""The store of a job, and errors of collectives, told apart by what gloo and torch say."""

import socket
from collections.abc import Iterator

import pytest

from dlrm_sharded.files.errors import ConfigError, LostRankError
from dlrm_sharded.ranks.job_store import CUT_OFF, HELD_OUT, OF_GLOO, connect

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
def test_timeouts(text):
    assert OF_GLOO.search(text)
    assert HELD_OUT.search(text)


@pytest.mark.parametrize("text", LOSSES)
def test_lost_connections(text):
    assert OF_GLOO.search(text)
    assert CUT_OFF.search(text)
    assert not HELD_OUT.search(text)


@pytest.mark.parametrize("text", ["timed out", "Connection reset by peer", "a bug"])
def test_errors_of_others(text):
    """Such as those of a data file on a network."""
    assert not OF_GLOO.search(text)


@pytest.fixture
def taken_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The job's port, at which a program that is no store accepts connections."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        yield port


def test_a_port_that_is_taken(taken_port, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=f"port {taken_port} of 127.0.0.1 is taken"):
        connect(20)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(LostRankError, match=f"127.0.0.1:{taken_port} within 0.5 s: its first"):
        connect(0.5)


@pytest.mark.parametrize("port", ["", "abc"])
def test_a_port_that_is_none(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"MASTER_PORT is '{port}'"):
        connect(20)
