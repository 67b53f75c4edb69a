"""Runs a function as the ranks of a job: of gloo on CPUs, as forks of the server, or on GPUs.

`python -m tests.preloaded.ranks CALL RESULT` is one of the ranks.
"""

import contextlib
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from os import environ, killpg
from pathlib import Path
from typing import Any

import torch

from dlrm_sharded.ranks.distributed import Rank, process_group
from tests import preloaded

HANGS_S = 600
"""Seconds after which a job hangs, as ranks do that do not agree."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    local_world_size: int | None = None,
    gpus: Sequence[str] = (),
) -> Any:
    """Return what rank 0 returned from `fn(rank, *args)`, with tensors on the CPU.

    Args:
        local_world_size: ranks of each host on which they take themselves to be; None for all.
        gpus: one for each rank; none for ranks on CPUs.
    """
    local_world_size = local_world_size or world_size
    with tempfile.TemporaryDirectory() as folder:
        call, result = Path(folder) / "call", Path(folder) / "result"
        call.write_bytes(pickle.dumps((fn, args)))
        arguments = ["-m", "tests.preloaded.ranks", str(call), str(result)]
        finish_all(arguments, environments(world_size, local_world_size, gpus))
        return torch.load(result, weights_only=False, map_location="cpu")  # our own file


def environments(
    world_size: int, local_world_size: int, gpus: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Return the environment of each rank of a job, see `run_ranks`."""
    job = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [
        job
        | environment(gpus[rank - rank % local_world_size :][:local_world_size])
        | {"RANK": str(rank), "LOCAL_RANK": str(rank % local_world_size)}
        for rank in range(world_size)
    ]


def free_port() -> int:
    """A free port of those that Linux does not give to other processes by itself meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def environment(gpus: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of a process that sees these GPUs, or none."""
    return {
        **environ,
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "DLRM_SHARDED_DEVICE": "cuda" if gpus else "cpu",
        "OMP_NUM_THREADS": "1",
    }


def finish_all(arguments: list[str], environments: list[dict[str, str]]) -> None:
    """Run a command in each environment, at the same time; a failure or a hang fails the test."""
    with tempfile.TemporaryFile("w+") as output:
        running = [
            preloaded.start(
                *arguments,
                env=variables,
                stdout=output,
                own_process=variables["DLRM_SHARDED_DEVICE"] == "cuda",
            )
            for variables in environments
        ]
        try:
            is_whole = _wait(running)
        finally:
            for process in running:
                if process.poll() is None:
                    killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        assert is_whole, output.read()


def _wait(running: list["subprocess.Popen[str]"]) -> bool:
    """Wait until all processes have succeeded, or one has failed."""
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        exit_codes = [process.poll() for process in running]
        if any(exit_codes) or None not in exit_codes:
            return not any(exit_codes)
        time.sleep(0.01)
    return False


def gathered(rank: Rank, value: Any) -> list[Any]:
    """Return the value of every rank, in rank order."""
    values: list[Any] = [None] * rank.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def main(call: str, result: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fn, args = pickle.loads(Path(call).read_bytes())
    with process_group(timeout_s=HANGS_S) as rank:
        torch.backends.cuda.matmul.allow_tf32 = False  # tests compare with what CPUs compute
        returned = fn(rank, *args)
        if rank.is_zero:
            torch.save(returned, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
