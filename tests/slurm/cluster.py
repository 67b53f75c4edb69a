"""A private Slurm with accounting on this machine, for jobs of several nodes.

The daemons and all commands live in one mount namespace, whose /etc/hosts knows the nodes; each
slurmd also has its node's host name. What is left in the namespace at the end has leaked.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hosts import why_no_hosts
from tests.preloaded.ranks import free_port
from tests.slurm.configuration import SLURM_CONF, SLURMDBD_CONF
from tests.slurm.namespace import kill, mount_namespace, processes_in

PACKAGES = "slurmctld slurmd slurm-client munge slurmdbd mariadb-server"
PROGRAMS = (
    *("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "mariadb-install-db"),
    *("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"),
    *("unshare", "nsenter", "setpriv", "mount"),
)
# Daemons stand where the PATH of a user need not lead.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
REQUEUE_LIMIT_S = 600.0


def why_not() -> str | None:
    """What keeps `slurm_cluster` from starting here."""
    if missing := [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]:
        return f"Slurm needs {', '.join(missing)}: apt-get install {PACKAGES}"
    reason = why_no_hosts()
    return f"Slurm needs namespaces of its own: {reason}" if reason else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A running Slurm; jobs go to partition `debug`.

    It takes nodes from jobs of partition `low`, which run again.
    """

    folder: Path
    nodes: tuple[str, ...]
    environment: Mapping[str, str]
    namespace: Path

    def run(self, argv: Sequence[str], *, cwd: Path) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run`, and no child is left behind."""
        with self.popen(argv, cwd=cwd) as process:
            try:
                stdout, stderr = process.communicate(timeout=600)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)

    def popen(self, argv: Sequence[str], *, cwd: Path) -> subprocess.Popen[str]:
        """A command that leads a session of its own, with pipes for its output and errors."""
        return subprocess.Popen(
            ["nsenter", f"--mount={self.namespace}", "env", f"--chdir={cwd.absolute()}", *argv],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def states(self, job_id: str) -> list[str]:
        """What sacct says of each component of a job, of its last run.

        It says nothing for a second after a job was submitted, and for five seconds after its
        start it may still say PENDING, or leave out components.
        """
        return self._ask(
            *("sacct", "--allocations", "--noheader", "--parsable2", "--format=State"),
            f"--jobs={job_id}",
        ).splitlines()

    def wait_for(
        self, job_id: str, *states: str, components: int = 1, timeout: float = 600
    ) -> list[str]:
        """The states of a job, once all its components are in one of these, given as one word."""
        deadline = time.monotonic() + timeout
        while True:
            found = self.states(job_id)
            if len(found) == components and all(state.split()[0] in states for state in found):
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is {found}, not {components} x {states}")
            time.sleep(0.1)

    def cancel(self, job_id: str) -> None:
        self._ask("scancel", job_id)

    def requeue(self, job_id: str) -> None:
        self._ask("scontrol", "requeue", job_id)

    def preempt(self) -> None:
        """Let a job take all nodes for a moment from whatever can be preempted."""
        size = (f"--nodes={len(self.nodes)}", "--exclusive")
        self._ask("sbatch", *size, "--output=/dev/null", "--wrap=true")

    def start_now(self, job_id: str) -> None:
        """Start a requeued job, once it is PENDING again.

        By itself it waits for ten seconds, and a heterogeneous one, on an idle cluster, for more
        than a minute after that. In the very second in which its last run was ended, nodes would
        take it for that one, and Slurm fails it for good.
        """
        queue = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job_id}")
        deadline = time.monotonic() + REQUEUE_LIMIT_S
        while set(found := self._ask(*queue).split()) != {"PENDING"}:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is {found}, not PENDING")
            time.sleep(0.1)
        time.sleep(1)
        self._ask("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    def _ask(self, *argv: str) -> str:
        done = self.run(argv, cwd=self.folder)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr}")
        return done.stdout


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Two nodes, `dlrm1` and `dlrm2`, of one size whatever the machine has.

    Args:
        folder: for settings and logs, and the database while it runs.

    Raises:
        RuntimeError: it did not start, with what its daemons logged; or something of it lived on
            when it had stopped, and is killed now.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    addresses = {f"dlrm{number}": f"127.0.1.{number}" for number in (1, 2)}
    hosts = "".join(f"{address}\t{name}\n" for name, address in addresses.items())
    (folder / "hosts").write_text(hosts + Path("/etc/hosts").read_text())
    (folder / "gres.conf").touch()
    # The path of a socket has at most 107 bytes, which those below a test's folder may exceed.
    with TemporaryDirectory(prefix="slurm-", dir="/tmp") as sockets:
        _write_settings(folder, sockets, addresses)
        with mount_namespace(folder / "hosts") as namespace:
            cluster = Cluster(
                folder=folder,
                nodes=tuple(addresses),
                environment=_environment(folder / "slurm.conf"),
                namespace=namespace,
            )
            with _daemons(cluster, Path(sockets)):
                try:
                    yield cluster
                finally:
                    _end_jobs(cluster)


def _write_settings(folder: Path, sockets: str, addresses: Mapping[str, str]) -> None:
    controller_port, accounting_port, *node_ports = (free_port() for _ in range(2 + len(addresses)))
    nodes = [
        f"NodeName={name} NodeAddr={address} Port={port} CPUs=4 RealMemory=8000"
        for (name, address), port in zip(addresses.items(), node_ports, strict=True)
    ]
    places = {"folder": folder, "sockets": sockets, "accounting_port": accounting_port}
    slurm_conf = SLURM_CONF.format(
        **places, controller_port=controller_port, nodes="\n".join(nodes)
    )
    (folder / "slurm.conf").write_text(slurm_conf)
    _write_secret(folder / "slurmdbd.conf", SLURMDBD_CONF.format(**places).encode())
    _write_secret(folder / "munge.key", secrets.token_bytes(128))


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def _environment(slurm_conf: Path) -> dict[str, str]:
    """Ours, less that of a Slurm job in which the tests themselves may run."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH", "SRUN"))
    }
    return {**ours, "PATH": PATH, "SLURM_CONF": str(slurm_conf)}


@contextmanager
def _daemons(cluster: Cluster, sockets: Path) -> Iterator[None]:
    folder = cluster.folder

    def no_socket(name: str) -> str:
        return "" if (sockets / name).exists() else f"no {sockets / name}"

    def no_answer(*argv: str, wanted: str = "") -> str:
        done = cluster.run(argv, cwd=folder)
        good = done.returncode == 0 and wanted in done.stdout
        return "" if good else f"{' '.join(argv)}: {done.stdout}{done.stderr}"

    with TemporaryDirectory(prefix="database-", dir=folder) as data, ExitStack() as stack:
        database = ["--no-defaults", "--user=root", f"--datadir={data}"]
        # of its own, as temporary tables of other servers may lie in /tmp
        database += ["--innodb-log-file-size=4M", f"--tmpdir={data}"]
        made = cluster.run(["mariadb-install-db", *database], cwd=folder)
        if made.returncode != 0:
            raise RuntimeError(f"mariadb-install-db: {made.stdout}{made.stderr}")

        def start(name: str, *argv: str, missing: Callable[[], str]) -> None:
            stack.enter_context(_daemon(cluster, name, argv, missing=missing))

        start(
            *("munged", "munged", "--foreground", "--force", f"--socket={sockets}/munge"),
            *(f"--key-file={folder}/munge.key", f"--seed-file={folder}/munge.seed"),
            *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log"),
            missing=partial(no_socket, "munge"),
        )
        start(
            *("mariadbd", "mariadbd", *database, f"--socket={sockets}/mysql"),
            *("--skip-networking", f"--pid-file={folder}/mariadbd.pid"),
            missing=partial(no_socket, "mysql"),
        )
        start(
            *("slurmdbd", "env", f"MYSQL_UNIX_PORT={sockets}/mysql", "slurmdbd", "-D"),
            missing=partial(no_answer, "sacctmgr", "--noheader", "list", "cluster"),
        )
        start("slurmctld", "slurmctld", "-D", missing=partial(no_answer, "scontrol", "ping"))
        for node in cluster.nodes:
            named = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'
            state = ["sinfo", "--noheader", "--partition=debug", f"--nodes={node}", "--format=%T"]
            start(
                *(f"slurmd-{node}", "unshare", "--uts", "sh", "-c", named, node),
                *("slurmd", "-D", "-N", node),
                missing=partial(no_answer, *state, wanted="idle"),
            )
        yield


@contextmanager
def _daemon(
    cluster: Cluster, name: str, argv: Sequence[str], *, missing: Callable[[], str]
) -> Iterator[None]:
    """A child in the foreground, which ends with this process at the latest.

    `missing` says what it does not do yet, and nothing once it is ready.
    """
    with (cluster.folder / f"{name}.log").open("a") as log:
        process = subprocess.Popen(
            ["nsenter", f"--mount={cluster.namespace}", "setpriv", "--pdeathsig=KILL", *argv],
            cwd=cluster.folder,
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with process:
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while found := missing():
                if process.poll() is not None or time.monotonic() > deadline:
                    how = "is not ready" if process.poll() is None else "has ended"
                    raise RuntimeError(f"{name} {how}: {found}\n{_log_tails(cluster.folder)}")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _log_tails(folder: Path) -> str:
    tails = []
    for log in sorted(folder.glob("*.log")):
        tails += [f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:]]
    return "\n".join(tails)


def _end_jobs(cluster: Cluster) -> None:
    """Cancel all jobs, without the grace that Slurm gives, and let it see them end."""
    cluster.run(["scancel", "--user=root"], cwd=cluster.folder)
    deadline = time.monotonic() + STOP_LIMIT_S
    while time.monotonic() < deadline:
        if not cluster.run(["squeue", "--noheader"], cwd=cluster.folder).stdout.strip():
            return
        environments = processes_in(cluster.namespace, "environ")
        kill(pid for pid, values in environments.items() if b"\0SLURM_JOB_ID=" in values)
        time.sleep(0.05)
