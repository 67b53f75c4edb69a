"""What the ranks of a test do, under our launcher and under torchrun; named on the command line."""

import itertools
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.files.errors import ConfigError, PreemptedError
from dlrm_sharded.ranks import watch
from dlrm_sharded.ranks.agreement import all_or_none, as_reported_by_rank_zero
from dlrm_sharded.ranks.attempt import RESTARTS_VARIABLE, is_restart
from dlrm_sharded.ranks.distributed import Rank, new_group, process_group
from dlrm_sharded.ranks.process import die_with_parent


def exchange() -> None:
    dist.all_reduce(torch.ones(1))


def wait_for_file(rank: Rank, folder: Path) -> None:
    """Exchange until the test says that all has been seen."""
    is_done = torch.zeros(1)
    while not is_done:
        is_done += float(rank.is_zero and (folder / "go").exists())
        dist.all_reduce(is_done)
        time.sleep(0.02)


def raise_agreed(rank: Rank, folder: Path) -> None:
    with all_or_none():
        if rank.rank == 1:
            raise ConfigError("rank one has no data")


def raise_alone(rank: Rank, folder: Path) -> None:
    if rank.rank == 1:
        raise ConfigError("rank one has no data")
    exchange()


def fail(rank: Rank, folder: Path) -> None:
    if rank.rank == 1:
        raise ValueError("a bug")
    exchange()


def misuse(rank: Rank, folder: Path) -> None:
    """End as argparse does after a wrong command line."""
    # one write, as lines of two ranks would mix
    os.write(2, f"rank {rank.rank} cannot read its command line\n".encode())
    sys.exit(2)


def die(rank: Rank, folder: Path) -> None:
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange()


def die_twice(rank: Rank, folder: Path) -> None:
    exchange()
    # Only our launcher counts the restarts of all hosts.
    attempt = int(os.environ.get(RESTARTS_VARIABLE, os.environ["TORCHELASTIC_RESTART_COUNT"]))
    (folder / f"attempt_{attempt}_{rank.rank}").touch()
    assert is_restart() == (attempt > 0)
    if attempt < 2:
        die(rank, folder)
    exchange()


def stop(rank: Rank, folder: Path) -> None:
    exchange()
    if rank.rank == int(os.environ["HUNG_RANK"]):
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_gather_object([None] * rank.world_size, None)


def checkpoint(rank: Rank, folder: Path) -> None:
    """End well after a signal, as a trainer does that writes a checkpoint first."""
    signals = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: signals.append(number))
    exchange()
    (folder / f"ready_{rank.rank}").touch()
    stopped = torch.zeros(1)
    while not stopped:
        stopped += len(signals)
        dist.all_reduce(stopped, op=dist.ReduceOp.MAX)
        time.sleep(0.02)
    while not (signals and (folder / "go").exists()):  # the disk is slow
        time.sleep(0.02)
    (folder / f"checkpoint_{rank.rank}").write_text(str(signals[0]))


def preempt(rank: Rank, folder: Path) -> None:
    """End after a signal to any rank, as a trainer does that has written a checkpoint."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    exchange()
    (folder / f"ready_{rank.rank}").touch()
    stopped = torch.zeros(1)
    while not stopped:
        stopped += len(signals)
        dist.all_reduce(stopped, op=dist.ReduceOp.MAX)
        time.sleep(0.02)
    raise as_reported_by_rank_zero(PreemptedError("SIGTERM stopped the training"))


def ready(rank: Rank, folder: Path) -> None:
    exchange()
    (folder / f"ready_{rank.rank}").touch()
    wait_for_file(rank, folder)


def name_interface(rank: Rank, folder: Path) -> None:
    """Exchange in the job's group, and in one that a job on GPUs would make of gloo."""
    exchange()
    dist.all_reduce(torch.ones(1), group=new_group(backend="gloo"))
    (folder / f"interface_{rank.rank}").write_text(os.environ["GLOO_SOCKET_IFNAME"])


def train(rank: Rank, folder: Path) -> None:
    """Take steps that the watch expects more often than those of a training."""
    watch.STALL_S = watch.ANSWER_S = watch.STORE_S = 2
    (folder / f"host_{rank.rank}").write_text(socket.gethostname())
    is_done = torch.zeros(1)
    for step in itertools.count(1):
        is_done += float(rank.is_zero and (folder / "go").exists())
        dist.all_reduce(is_done)
        rank.heartbeat.beat(step)
        if step == 1:  # a disk may be slow, and each step that is would be said
            (folder / f"ready_{rank.rank}").touch()
        if is_done:
            break
        time.sleep(0.02)
    rank.heartbeat.end()


def main(what: str, folder: Path, timeout_s: float) -> None:
    die_with_parent()
    with exit_codes(), process_group(timeout_s=timeout_s) as rank:
        (folder / f"pid_{rank.rank}").write_text(str(os.getpid()))
        globals()[what](rank, folder)


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
