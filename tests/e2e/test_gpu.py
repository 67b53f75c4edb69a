"""The CUDA path: every GPU of the machine, NCCL, the overlapping pipeline."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import GPUS

ROOT = Path(__file__).resolve().parents[2]


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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    overrides = [
        f"optimizer={optimizer}",
        "trainer.num_steps=60",
        "model.bf16=true",
        "trainer.eval_every_steps=20",
    ]
    done = subprocess.run(
        [
            *(*torchrun, "--nproc-per-node", str(num_gpus()), "-m", "dlrm_sharded.train"),
            *(f"hydra.run.dir={tmp_path}", *overrides),
        ],
        cwd=ROOT,
        env=environment | ({"CUDA_VISIBLE_DEVICES": GPUS} if GPUS else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert "cpu" not in result["device"]
    assert result["world_size"] == num_gpus()
    assert math.isfinite(result["loss"])
    assert result["auroc"] > 0.6
