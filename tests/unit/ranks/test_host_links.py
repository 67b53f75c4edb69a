"""Which interface connects hosts, with threads of this process as the ranks of several hosts."""

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks import host_links
from dlrm_sharded.ranks.host_links import connect_hosts, interface_addresses, is_loopback
from tests.unit.ranks.jobs import JobOfThreads


def test_the_loopback_of_this_machine():
    assert ("lo", "127.0.0.1") in interface_addresses()


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.1.1", True), ("::1", True), ("10.0.0.1", False), ("fe80::1%eth0", False)],
)
def test_addresses_of_the_loopback(address, expected):
    assert is_loopback(address) == expected


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """A store of the job, on this host."""
    monkeypatch.setenv(host_links.GLOO_VARIABLE, "")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return dist.HashStore()


def connect(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store, networks: str
) -> list[Exception | None]:
    """Return the error of each rank, whose network is one of the letters."""
    this = threading.local()
    monkeypatch.setattr(host_links, "network_name", lambda: this.network)

    def rank_error(rank: int) -> Exception | None:
        this.network = networks[rank]
        try:
            connect_hosts(JobOfThreads(rank, len(networks), store))
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(len(networks)) as threads:
        return list(threads.map(rank_error, range(len(networks))))


@pytest.mark.parametrize("networks", ["a", "aa"])
def test_one_host_stays_as_it_is(networks, store, monkeypatch):
    assert connect(monkeypatch, store, networks) == [None] * len(networks)
    assert not os.environ[host_links.GLOO_VARIABLE]


@pytest.mark.parametrize("networks", ["ab", "aabb", "abab", "abc"])
def test_hosts_that_reach_each_other(networks, store, monkeypatch):
    assert connect(monkeypatch, store, networks) == [None] * len(networks)
    assert os.environ[host_links.GLOO_VARIABLE] == "lo"


def test_an_interface_that_is_none(store, monkeypatch):
    monkeypatch.setenv(host_links.GLOO_VARIABLE, "ib7")
    for error in connect(monkeypatch, store, "ab"):
        assert isinstance(error, ConfigError)
        assert "GLOO_SOCKET_IFNAME is 'ib7' on " in str(error)
        assert "lo (127.0.0.1)" in str(error)


def test_a_host_that_is_not_reached(store, monkeypatch):
    """Each rank names both ends of the first connection that fails."""
    monkeypatch.setattr(host_links.socket, "create_connection", Mock(side_effect=OSError("No way")))
    for error in connect(monkeypatch, store, "abc"):
        ends = r"\S+ \(lo, 127.0.0.1\) cannot connect to \S+ \(lo, 127.0.0.1\): No way"
        assert re.match(rf"{ends}; set GLOO_SOCKET_IFNAME", str(error))
