"""The store of a job, and ports that are none of it."""

import gc
import socket
from collections.abc import Iterator

import pytest

from dlrm_sharded.files.errors import ConfigError, LostRankError
from dlrm_sharded.ranks import job_store
from dlrm_sharded.ranks.job_store import connect
from tests.preloaded.ranks import free_port


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
    with pytest.raises(ConfigError, match=f"127.0.0.1:{taken_port} .*EADDRINUSE"):
        connect(20)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(LostRankError, match=f"127.0.0.1:{taken_port} within 0.5 s: its first"):
        connect(0.5)


@pytest.mark.parametrize("port", ["", "abc"])
def test_a_port_that_is_none(port, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} within .*invalid literal"):
        connect(20)


def test_rank_zero_serves_the_store_until_it_ends(monkeypatch):
    """Its objects go after an error, while another rank may still read there."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(job_store, "_served", None)
    connect(20).set("key", "read after an error")
    gc.collect()
    monkeypatch.setenv("RANK", "1")
    assert connect(5).get("key") == b"read after an error"
