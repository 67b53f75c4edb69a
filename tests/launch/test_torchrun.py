"""Our launcher: what it says last, its exit codes, its sockets, restarts, and its end."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from dlrm_sharded.ranks.host_agent import LIMIT_AFTER_SUCCESS_S
from tests import preloaded
from tests.e2e.runs import LAUNCHERS, environment
from tests.launch.conftest import LISTENING
from tests.preloaded.ranks import free_port
from tests.processes import is_running, wait_until

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("rank_program.py")
Job: TypeAlias = "subprocess.Popen[str]"
Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a job of two ranks in a session of its own; it is ended with the test."""
    jobs: list[subprocess.Popen[str]] = []

    def start_job(
        what: str,
        *options: str,
        timeout_s: float = 300,
        env: dict[str, str] | None = None,
        own_process: bool = False,
    ) -> "subprocess.Popen[str]":
        job = preloaded.start(
            *(*LAUNCHERS["ours"], "2", *options, str(PROGRAM), what, str(tmp_path)),
            str(timeout_s),
            before=LISTENING,
            env=environment() | (env or {}),
            own_process=own_process,
        )
        jobs.append(job)
        return job

    yield start_job
    for job in jobs:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)  # the ranks die with it
        if job.stdout is not None and not job.stdout.closed:
            job.communicate()


def ended(job: "subprocess.Popen[str]", exit_code: int) -> list[str]:
    """The lines of a job that ends by itself."""
    output, _ = job.communicate()
    assert job.returncode == exit_code, output
    return [line for line in output.splitlines() if line.strip()]


def ranks_of(folder: Path) -> list[int]:
    wait_until(lambda: all((folder / f"ready_{r}").exists() for r in (0, 1)), "ranks run")
    return [int((folder / f"pid_{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("what", ["raise_agreed", "raise_alone"])
def test_an_error_that_the_user_can_fix(what, start):
    lines = ended(start(what, "--max-restarts", "2"), 2)
    assert lines[-1].endswith("rank 1: rank one has no data")
    output = "\n".join(lines)
    assert "Traceback" not in output
    assert "start again" not in output, "it would end the same way"
    if what == "raise_agreed":
        assert len(lines) == 1


def test_a_wrong_command_line_is_not_tried_again(start):
    """A program that ends with 2 before it could write a message for the launcher."""
    lines = ended(start("misuse", "--max-restarts", "2"), 2)
    assert sorted(lines) == [f"rank {r} cannot read its command line" for r in (0, 1)]


def test_a_bug(start):
    lines = ended(start("fail"), 1)
    assert lines[-1] == ("error: rank 1 failed with ValueError: a bug (its traceback is above)")
    assert "\n".join(lines).count("Traceback") == 1
    assert "ChildFailedError" not in "\n".join(lines)


def test_restarts(start, tmp_path):
    """Gloo finds the ranks of its own attempt."""
    lines = ended(start("die_twice", "--max-restarts", "2"), 0)
    assert len(list(tmp_path.glob("attempt_*"))) == 6
    restarts = [line for line in lines if "start again" in line]
    reasons = [line.partition(";")[0] for line in restarts]
    assert reasons == ["error: rank 1 was killed by SIGKILL"] * 2
    assert "restart 2" in restarts[1]


def on_two_hosts(start: Start, backend: str, what: str, *options: str) -> list[Job]:
    """Launchers of one job, with one rank each, as on two hosts."""
    port = free_port()
    options = ("--nnodes", "2", "--nproc-per-node", "1", *options)
    of_hosts = [["--rdzv-backend", "c10d", "--rdzv-id", "a_job"]] * 2
    where = ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    if backend == "static":
        of_hosts = [["--node-rank", str(host)] for host in range(2)]
        where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return [start(what, *options, *of_host, *where) for of_host in of_hosts]


def test_restarts_on_two_hosts(start, tmp_path):
    """Two agents, whose own counts of restarts differ; each serves the ranks of both."""
    for job in on_two_hosts(start, "c10d", "die_twice", "--max-restarts", "2"):
        ended(job, 0)
    assert len(list(tmp_path.glob("attempt_*"))) == 6


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_mistake_ends_both_hosts_with_its_message(backend, start):
    """The ranks of one of them have not found it, and could lose the store of the other."""
    for job in on_two_hosts(start, backend, "raise_alone", "--max-restarts", "2"):
        lines = ended(job, 2)
        assert lines[-1] == "error on rank 1: rank one has no data"
        output = "\n".join(lines)
        assert output.count("rank one has no data") == 1
        assert "start again" not in output
        assert "frame #" not in output, "C++ of a store that is gone"


@pytest.mark.parametrize("host", [0, 1])  # one of them serves the store of the launchers
def test_a_drained_host_ends_the_other(host, start, tmp_path):
    """Its ranks have ended well, and the run is not complete."""
    began = time.monotonic()
    jobs = on_two_hosts(start, "c10d", "preempt")
    ranks_of(tmp_path)
    jobs[host].send_signal(signal.SIGTERM)
    for job in jobs:
        ended(job, 128 + signal.SIGTERM)
    assert time.monotonic() - began < LIMIT_AFTER_SUCCESS_S, "torchrun waits for a host that ends"


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_port_that_is_taken(backend, start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        where = ["--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", place[10:]]
        if backend == "c10d":
            conf = ["--rdzv-conf", "is_host=1"]
            where = ["--rdzv-backend", "c10d", "--rdzv-id", "a", "--rdzv-endpoint", place, *conf]
        [line] = ended(start("ready", "--nnodes", "2", *where), 2)
    assert line.startswith(f"error: the hosts did not meet at {place}: ")
    assert "inner exception" not in line


def test_a_killed_rank(start):
    lines = ended(start("die"), 1)
    assert lines[-1].startswith("error: rank 1 was killed by SIGKILL")
    if len(lines) > 1:  # the launcher may end the other rank before it has said this
        (lost,) = lines[:-1]
        assert "lost the connection to another rank in all_reduce in exchange" in lost


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_ranks_answer_a_signal_with_a_checkpoint(number, start, tmp_path):
    job = start("checkpoint")
    ranks = ranks_of(tmp_path)
    job.send_signal(number)
    job.send_signal(number)
    (tmp_path / "go").touch()
    lines = ended(job, 128 + number)
    said = f"{number.name}: the ranks are ended; those that train write a checkpoint first"
    assert lines == ([] if number == signal.SIGINT else [said])
    assert [(tmp_path / f"checkpoint_{r}").read_text() for r in (0, 1)] == [str(int(number))] * 2
    assert not any(map(is_running, ranks))


def test_a_killed_launcher_leaves_no_ranks(start, tmp_path):
    job = start("ready", own_process=True)
    ranks = ranks_of(tmp_path)
    job.kill()
    wait_until(lambda: not any(map(is_running, ranks)), "no rank is left")


def listening(pids: list[int]) -> set[str]:
    """Addresses, in hexadecimal, at which processes of this machine wait for connections."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(link.readlink()))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def test_nothing_listens_to_the_network(start, tmp_path):
    job = start("ready", own_process=True)
    addresses = listening([job.pid, *ranks_of(tmp_path)])
    assert addresses == {"0100007F"}, "127.0.0.1, in the byte order of this machine"
    (tmp_path / "go").touch()
    ended(job, 0)


def test_a_hung_rank_is_named(start):
    env = {"HUNG_RANK": "1"}
    [message] = ended(start("stop", timeout_s=20, env=env, own_process=True), 1)
    place = "all_gather_object in stop"
    who_waits = rf"waiting: rank 0 \(\S+\) in {place}; waited for: rank 1 \("
    assert message.startswith("error: a collective has timed out (timeout_s is 20): ")
    assert re.search(who_waits, message), message
