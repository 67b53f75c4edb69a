"""Kill random processes of a job on two hosts; it must go on each time, and end as undisturbed."""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_sharded.files.text_table import Column, TextTable
from tests.launch.two_hosts import Host, two_hosts, why_not
from tests.preloaded import ROOT
from tests.soak.folders import folder_of
from tests.soak.training_run import SMALL, TrainingRun, kill, until

log = logging.getLogger(__name__)

HOST = "DLRM_SHARDED_SOAK_HOST"
"""Environment variable with the number of the host that a process runs on."""

INTERVAL, STEPS_OF_A_KILL = 20, 400
MAX_PAUSE_S = 2.0
PROCESSES = ("rank", "launcher")
RENDEZVOUS = 1
"""Number of the host whose launcher serves the rendezvous."""


class RunOfHosts(TrainingRun):
    """A run with one rank on each host, whose launchers are started again when they have ended."""

    def __init__(self, folder: Path, hosts: Sequence[Host], num_steps: int) -> None:
        overrides = [f"trainer.num_steps={num_steps}", "trainer.num_epochs=9999"]
        overrides += [f"trainer.checkpoint.every_steps={INTERVAL}", "resume=auto"]
        super().__init__(folder, *SMALL, *overrides)
        self._hosts = hosts
        self._launchers: dict[int, subprocess.Popen[str]] = {}

    def start(self, *overrides: str) -> None:
        """Start the launchers that do not run, unless they have ended well."""
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint"]
        command = [
            *("-m", "dlrm_sharded.ranks.torchrun", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--max-restarts", "1000", *rendezvous, f"{self._hosts[0].name}:29431"),
            *("-m", "dlrm_sharded.train", f"hydra.run.dir={self.folder}", *self._overrides),
        ]
        for host in self._hosts:
            launcher = self._launchers.get(host.number)
            if launcher is not None and launcher.poll() in (None, 0):
                continue
            env = self.environment() | {HOST: str(host.number)}
            with self._output.open("a") as output:
                self._launchers[host.number] = host.start(
                    *command, *overrides, env=env, cwd=ROOT, stdout=output
                )

    @property
    def has_ended(self) -> bool:
        return all(launcher.poll() == 0 for launcher in self._launchers.values())

    def pid(self, host: Host, process: str) -> int | None:
        """Return a living process of a host."""
        for pid, environment in self.environments().items():
            is_rank = "RANK" in environment
            if environment.get(HOST) == str(host.number) and is_rank == (process == "rank"):
                return pid
        return None


@dataclass(frozen=True, slots=True)
class Kill:
    """What came after a process was killed; `resume_s` is the time until the ranks went on."""

    process: str
    host: int
    resume_s: float | None
    fault: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=30, help="kills [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills [%(default)s]")
    parser.add_argument("--folder", type=Path, help="where runs are kept; by default nowhere")


def run(options: argparse.Namespace) -> int:
    if reason := why_not():
        print(reason)
        return 1
    num_steps = STEPS_OF_A_KILL * (options.number + 1)
    with folder_of(options.folder) as folder, two_hosts(folder) as hosts:
        undisturbed = RunOfHosts(folder / "undisturbed", hosts, num_steps)
        killed = RunOfHosts(folder / "killed", hosts, num_steps)
        try:
            undisturbed.start()
            until(lambda: undisturbed.has_ended, "the end of the undisturbed run")
            kills = _kill(killed, hosts, options.number, random.Random(options.seed))
            until(lambda: killed.has_ended, "the end of the run")
        finally:
            undisturbed.stop()
            killed.stop()
        differing = [
            f"{key} in result.json is {killed.result().get(key)} instead of {expected}"
            for key, expected in undisturbed.result().items()
            if key in ("steps", "loss", "auroc", "normalized_entropy")
            and killed.result().get(key) != expected
        ]
    print(table(kills, differing))
    return 1 if differing or any(done.fault for done in kills) else 0


def _kill(killed: RunOfHosts, hosts: Sequence[Host], number: int, rng: random.Random) -> list[Kill]:
    kills: list[Kill] = []
    killed.start()
    newest = 0
    while len(kills) < number:
        last = newest
        until(lambda: killed.has_ended or _newest(killed) > last, "a checkpoint", poll_s=0.05)  # noqa: B023
        time.sleep(rng.uniform(0.0, MAX_PAUSE_S))
        host, process = rng.choice(hosts), rng.choice(PROCESSES)
        newest, num_starts, killed_s = _newest(killed), len(killed.starts()), time.monotonic()
        pid = killed.pid(host, process)
        if killed.has_ended or pid is None:
            raise RuntimeError(f"the run ended after {len(kills)} kills: {killed.output()[-2000:]}")
        kill(pid, signal.SIGKILL)

        def goes_on() -> bool:
            killed.start()
            return len(killed.starts()) > num_starts  # noqa: B023

        until(goes_on, "the next start", poll_s=0.1)
        resumed = killed.starts()[num_starts]
        fault = None
        if resumed < newest:
            fault = f"the run went on at step {resumed}, it had a checkpoint at {newest}"
        kills.append(Kill(process, host.number, time.monotonic() - killed_s, fault))
        log.warning("%d: %s", len(kills), kills[-1])
    return kills


def _newest(run: RunOfHosts) -> int:
    return max([0, *run.saved_steps()])


def table(kills: Sequence[Kill], differing: Sequence[str]) -> str:
    """Return a Markdown table by process and host, and all faults."""
    rows = []
    for process, number in itertools.product(PROCESSES, (1, 2)):
        found = [done for done in kills if (done.process, done.host) == (process, number)]
        if not found:
            continue
        took = [done.resume_s for done in found if done.resume_s is not None]
        where = "with the rendezvous" if number == RENDEZVOUS else "the other"
        resumed = sum(done.fault is None for done in found)
        rows.append((process, where, len(found), resumed, statistics.median(took), max(took)))
    seconds = (Column("s to the next start, median", ".1f"), Column("longest", ".1f"))
    end = "; ".join(differing) or "the run ended like the undisturbed one"
    lines = [TextTable(["killed", "on the host", "number", "resumed", *seconds], rows).markdown()]
    return "\n".join([*lines, "", end, *(f"fault: {k.fault}" for k in kills if k.fault)])
