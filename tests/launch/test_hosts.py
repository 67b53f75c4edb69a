"""Jobs of two hosts: how they find the network between them, and what they say when it breaks."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.runs import environment
from tests.launch.test_torchrun import PROGRAM, ended
from tests.launch.two_hosts import CLOSED, OPEN, Host, two_hosts, why_not
from tests.processes import wait_until

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

Job = Sequence["subprocess.Popen[str]"]
PORT = "29431"
"""The namespaces are new, so every port is free."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Sequence[Host]]:
    with two_hosts(tmp_path) as made:
        yield made


@pytest.fixture
def start(hosts: Sequence[Host], tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a job with a rank on each host, which ends with the test."""
    agents: list[subprocess.Popen[str]] = []

    def start_job(what: str, *rendezvous: str, timeout_s: float = 300, **env: str) -> Job:
        root = str(Path(__file__).parents[2])
        env = environment() | {"PYTHONPATH": root, **env}
        for name in {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - env.keys():
            env.pop(name, None)
        for host in hosts:
            options = [*rendezvous, "--nnodes", "2", "--nproc-per-node", "1"]
            if "static" in rendezvous:
                options += ["--node-rank", str(host.number - 1)]
            command = ["-m", "dlrm_sharded.ranks.torchrun", *options, str(PROGRAM), what]
            arguments = [*command, str(tmp_path), str(timeout_s)]
            agents.append(host.start(*arguments, env=env, cwd=tmp_path))
        return agents

    yield start_job
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        if agent.stdout is not None and not agent.stdout.closed:
            agent.communicate()


def c10d(endpoint: str) -> list[str]:
    return ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{endpoint}:{PORT}"]


def static(address: str) -> list[str]:
    return ["--rdzv-backend", "static", "--master-addr", address, "--master-port", PORT]


RENDEZVOUS = {
    "c10d_by_name": c10d("dlrm1"),
    "c10d_at_the_second_host": c10d("dlrm2"),
    "static_by_address": static("10.77.1.1"),
}


@pytest.mark.parametrize("name", RENDEZVOUS)
def test_gloo_takes_the_network_between_the_hosts(name, start, tmp_path):
    """Although the name of each host is an address of its loopback, and one network is closed."""
    for agent in start("name_interface", *RENDEZVOUS[name]):
        ended(agent, 0)
    assert [(tmp_path / f"interface_{rank}").read_text() for rank in (0, 1)] == [OPEN] * 2


def only_line(agent: "subprocess.Popen[str]") -> str:
    """The error of an agent that ends with 2; torch logs what it thinks of other agents' end."""
    (line,) = (line for line in ended(agent, 2) if line.startswith("error: "))
    return line


def test_a_closed_network_is_named(start):
    """An interface that the user names is kept, and tried before ranks would wait for it."""
    for agent in start("name_interface", *c10d("dlrm1"), GLOO_SOCKET_IFNAME=CLOSED):
        line = only_line(agent)
        pair = rf"dlrm\d \({CLOSED}, 10.66.1.\d\) cannot connect to dlrm\d \({CLOSED}, 10.66.1.\d\)"
        assert re.search(rf"error: {pair}: .*; set GLOO_SOCKET_IFNAME", line), line


def test_an_interface_that_is_none(start):
    for agent in start("name_interface", *c10d("dlrm1"), GLOO_SOCKET_IFNAME="ib7"):
        line = only_line(agent)
        assert re.search(rf"GLOO_SOCKET_IFNAME is 'ib7' on dlrm\d, .*{OPEN} \(10.77.1.\d\)", line)


def lines_until(agent: "subprocess.Popen[str]", beginning: str) -> str:
    """The first line of a job with this beginning."""
    assert agent.stdout is not None
    for line in agent.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"ended without a line that begins with {beginning!r}")


def test_a_dead_link_is_said_on_both_sides(start, hosts, tmp_path):
    """The side with the job's store names who is waited for; after the link comes back, it trains.

    The store is on the host of rank 0.
    """
    agents = start("train", *c10d("dlrm1"))
    wait_until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in (0, 1)), "steps end")
    rank_of = {host.name: rank for rank, host in enumerate(hosts)}
    assert (tmp_path / "host_0").read_text() in rank_of
    hosts[1].ip("link", "set", OPEN, "down")
    by_host = [lines_until(agent, "no progress for") for agent in agents]
    server = [(tmp_path / "host_0").read_text() == host.name for host in hosts].index(True)
    waiting, cut_off = by_host[server], by_host[1 - server]
    assert re.search(
        r"after step \d+, waiting: rank 0 \(dlrm\d\) in all_reduce in train; "
        r"waited for: rank 1 \(dlrm\d\) without an answer; the run ends when",
        waiting,
    ), waiting
    assert "rank 1 (dlrm" in cut_off
    assert "in all_reduce in train, and cannot reach the job's store at " in cut_off
    hosts[1].ip("link", "set", OPEN, "up")
    for agent in agents:
        lines_until(agent, "progress again")
    (tmp_path / "go").touch()
    for agent in agents:
        ended(agent, 0)


def test_a_dead_link_ends_the_run_at_its_timeout(start, hosts, tmp_path):
    agents = start("train", *c10d("dlrm1"), timeout_s=15)
    wait_until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in (0, 1)), "steps end")
    hosts[1].ip("link", "set", OPEN, "down")
    outputs = ["\n".join(ended(agent, 1)) for agent in agents]
    assert all("a collective has timed out (timeout_s is 15): " in output for output in outputs)
    assert any("waited for: rank 1 (dlrm" in output for output in outputs)
    assert any("cannot reach the job's store" in output for output in outputs)
