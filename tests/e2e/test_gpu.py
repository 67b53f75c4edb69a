"""The CUDA path: every GPU of the machine, NCCL, the overlapping pipeline."""

import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import GPUS
from tests.e2e.runs import ROOT, command, result_of


def num_gpus() -> int:
    if shutil.which("nvidia-smi") is None or GPUS == "":
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() == 0, reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_trains_on_every_gpu(optimizer: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    overrides = [
        f"optimizer={optimizer}",
        "trainer.num_steps=60",
        "model.bf16=true",
        "trainer.eval_every_steps=20",
    ]
    done = subprocess.run(
        [*command(num_gpus()), f"hydra.run.dir={tmp_path}", *overrides],
        cwd=ROOT,
        env=environment | ({"CUDA_VISIBLE_DEVICES": GPUS} if GPUS else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path)
    assert "cpu" not in result["device"]
    assert result["world_size"] == num_gpus()
    assert math.isfinite(result["loss"])
    assert result["auroc"] > 0.6
