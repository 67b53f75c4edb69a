"""The CUDA path: every GPU of the machine, NCCL, the overlapping pipeline."""

import math
import os
import subprocess
from pathlib import Path

import pytest

from dlrm_sharded.gpus import visible_gpus
from tests.conftest import GPUS
from tests.e2e.runs import ROOT, command, result_of

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
if GPUS is not None:
    ENVIRONMENT["CUDA_VISIBLE_DEVICES"] = GPUS
NUM_GPUS = len(visible_gpus(ENVIRONMENT))


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_trains_on_every_gpu(optimizer: str, tmp_path: Path) -> None:
    overrides = [
        f"optimizer={optimizer}",
        "trainer.num_steps=60",
        "model.bf16=true",
        "trainer.eval_every_steps=20",
    ]
    done = subprocess.run(
        [*command(NUM_GPUS), f"hydra.run.dir={tmp_path}", *overrides],
        cwd=ROOT,
        env=ENVIRONMENT | {"DLRM_SHARDED_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = result_of(tmp_path)
    assert "cpu" not in result["device"]
    assert result["world_size"] == NUM_GPUS
    assert math.isfinite(result["loss"])
    assert result["auroc"] > 0.6
