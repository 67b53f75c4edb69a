"""A Slurm job that loses a node goes on with the ranks that are left, under a plan for them."""

import json
import os
import shlex
import signal
import sys

import pytest

from tests.conftest import SMALL_RUN
from tests.e2e.runs import result_of
from tests.processes import wait_until

pytestmark = pytest.mark.slow

PORT = 29_433


def test_a_lost_node(slurm, tmp_path):
    """A launcher that dies stands for a node; the other one serves the rendezvous."""
    run = tmp_path / "run"
    plan, log = run / "plan.json", tmp_path / "log"
    launcher = [
        *(sys.executable, "-m", "dlrm_sharded.ranks.torchrun"),
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "a_job", "--rdzv-endpoint", f"dlrm1:{PORT}"),
        *("--rdzv-conf", "last_call_timeout=10"),
        *("-m", "dlrm_sharded.train", f"hydra.run.dir={run}", "sharder=dim", *SMALL_RUN),
        *("trainer.num_steps=600", "trainer.num_epochs=999", "trainer.checkpoint.every_steps=20"),
    ]
    remember = f"echo $$ > {tmp_path}/pid_$SLURM_NODEID; exec {shlex.join(launcher)}"
    step = ["srun", "--kill-on-bad-exit=0", "--wait=0", "sh", "-c", remember]
    job = slurm.submit(
        *("--nodes=2", "--ntasks-per-node=1", "--no-kill", f"--output={log}"),
        f"--wrap={shlex.join(step)}",
        cwd=tmp_path,
    )
    wait_until(
        lambda: plan.exists() and json.loads(plan.read_text())["world_size"] == 2,
        "both nodes have a plan",
        300,
    )
    wait_until(lambda: list(run.glob("checkpoints/step-*/manifest.json")), "a checkpoint", 300)
    os.kill(int((tmp_path / "pid_1").read_text()), signal.SIGKILL)
    slurm.wait_for(job, "COMPLETED", "FAILED")
    output = log.read_text()
    assert "all ranks start again (restart 1)" in output, output
    assert "resuming at step" in output
    assert json.loads(plan.read_text())["world_size"] == 1
    assert result_of(run)["steps"] == 600
