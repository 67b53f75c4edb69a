"""Run a function on every GPU of the machine; and on CPUs, as a rehearsal.

`pytest -m gpu` runs the tests with the parameter `ON_GPUS` on 1, 2 or 8 GPUs alike. The same tests
with "cpu" show without a GPU that they run.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_sharded.distributed import process_group
from tests.conftest import GPUS, ROOT
from tests.e2e.test_gpu import num_gpus

TIMEOUT_S = 300
"""A job that takes longer hangs, as NCCL does when ranks do not agree."""

NUM_CPU_RANKS = 3

ON_GPUS = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(num_gpus() == 0, reason="needs a CUDA device"),
    ],
)


def run_on(device: str, function: str, *, num_ranks: int | None = None) -> Any:
    """What rank 0 returned from `function(rank)`, as JSON.

    Args:
        function: module and name, such as "tests.gpu.test_measuring:collect_in_groups".
        num_ranks: None for one for every GPU, or a few on a CPU.
    """
    num_ranks = num_ranks or {"cpu": NUM_CPU_RANKS, "cuda": num_gpus()}[device]
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    visible = "" if device == "cpu" else GPUS
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        done = subprocess.run(
            [sys.executable, "-m", *torchrun, "-m", __name__, device, function, str(result)],
            cwd=ROOT,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout
        return json.loads(result.read_text())


def main(device: str, function: str, result: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module, name = function.split(":")
    with process_group(timeout_s=120) as rank:
        assert rank.device.type == device
        returned = getattr(importlib.import_module(module), name)(rank)
        if rank.is_zero:
            Path(result).write_text(json.dumps(returned))


if __name__ == "__main__":
    main(*sys.argv[1:])
