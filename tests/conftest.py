"""Tests run on the CPU, with gloo, whatever the machine has; those marked gpu say otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL_RUN = [
    *("batch_size=256", "trainer.num_steps=12", "trainer.log_every_steps=4"),
    "data.max_rows=500",
]
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def finished_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two sharders with two seeds each, small, as a user starts it."""
    sweep = tmp_path_factory.mktemp("sweeps") / "sweep"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dlrm_sharded.train", "-m"),
            *("seed=0,1", "sharder=random,size_lookup", *SMALL_RUN, f"hydra.sweep.dir={sweep}"),
        ],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sweep / "output.txt").write_text(done.stdout)
    return sweep
