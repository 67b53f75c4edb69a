"""Run functions and commands on GPUs of the machine; and on CPUs, as a rehearsal.

`pytest -m gpu` runs the tests with parameters of `needs_gpus` on 1, 2 or 8 GPUs alike. The same
tests with "cpu" show without a GPU that they run.
"""

import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.ranks.distributed import process_group
from dlrm_sharded.ranks.gpus import visible_gpus
from tests.conftest import GPUS, ROOT

TIMEOUT_S = 300
"""A job that takes longer hangs, as NCCL does when ranks do not agree."""

NUM_CPU_RANKS = 3


@functools.cache
def gpus() -> list[str]:
    """GPUs that the tests were given, which hide them from this process."""
    given = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    if GPUS is not None:
        given["CUDA_VISIBLE_DEVICES"] = GPUS
    return visible_gpus(given)


def needs_gpus(number: int) -> list[pytest.MarkDecorator]:
    """Marks of a test that runs on so many GPUs."""
    devices = "a CUDA device" if number == 1 else f"{number} CUDA devices"
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(len(gpus()) < number, reason=f"needs {devices}"),
    ]


ON_GPUS = pytest.param("cuda", marks=needs_gpus(1))


def run_on(
    device: str,
    function: str,
    *args: Any,
    num_ranks: int | None = None,
    num_hosts: int = 1,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """What rank 0 returned from `function(rank, *args)`, with tensors on the CPU.

    Args:
        function: module and name, such as "tests.gpu.test_measuring:collect_in_groups".
        args: what JSON can say.
        num_ranks: None for one for every GPU, or a few on a CPU.
        num_hosts: hosts that the ranks take themselves to be on, each with GPUs of its own.
    """
    num_ranks = num_ranks or {"cpu": NUM_CPU_RANKS, "cuda": len(gpus())}[device]
    local_world_size = num_ranks // num_hosts
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nproc-per-node", str(local_world_size)]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        result = Path(folder) / "result.pt"
        function_call = ["-m", __name__, device, function, json.dumps(args), str(result)]
        commands = [
            [*torchrun, *_rendezvous(host, num_hosts, endpoint), *function_call]
            for host in range(num_hosts)
        ]
        environments = [
            environment(device, range(host * local_world_size, (host + 1) * local_world_size))
            for host in range(num_hosts)
        ]
        finish_all(commands, environments, timeout_s=timeout_s)
        return torch.load(result, weights_only=False, map_location="cpu")  # our own file


def environment(device: str, places: range | None = None) -> dict[str, str]:
    """Environment of a command that sees no GPU, or some of those that the tests were given.

    Args:
        places: places among `gpus`; None for all of them.
    """
    visible = gpus() if places is None else gpus()[places.start : places.stop]
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(visible) if device == "cuda" else "",
        "DLRM_SHARDED_DEVICE": device,
        "OMP_NUM_THREADS": "1",
    }


def finish_all(
    commands: list[list[str]], environments: list[dict[str, str]], *, timeout_s: float = TIMEOUT_S
) -> str:
    """Run commands beside each other; what all printed. A failure or a hang fails the test."""
    with tempfile.TemporaryFile("w+") as output:
        running = [
            subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, text=True
            )
            for command, env in zip(commands, environments, strict=True)
        ]
        try:
            exit_codes = [process.wait(timeout_s) for process in running]
            failed = any(exit_codes)
        except subprocess.TimeoutExpired:
            failed = True
        finally:
            for process in running:
                process.kill()  # its ranks end with it
                process.wait()
        output.seek(0)
        printed = output.read()
    assert not failed, printed
    return printed


def _rendezvous(host: int, num_hosts: int, endpoint: str) -> list[str]:
    if num_hosts == 1:
        return ["--standalone"]
    address, port = endpoint.split(":")
    return [
        *("--nnodes", str(num_hosts), "--node-rank", str(host)),
        *("--master-addr", address, "--master-port", port),
    ]


def main(device: str, function: str, args: str, result: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module, name = function.split(":")
    with process_group(timeout_s=120) as rank:
        assert rank.device.type == device
        returned = getattr(importlib.import_module(module), name)(rank, *json.loads(args))
        if rank.is_zero:
            torch.save(returned, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
