"""A job that loses a host goes on with the ranks that are left, under a plan for them."""

import json
import os
import signal

import pytest

from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.own_datasets import Slow, settings_of
from tests.e2e.runs import environment, result_of
from tests.preloaded.ranks import free_port
from tests.processes import wait_until

pytestmark = pytest.mark.slow


def test_a_lost_host(tmp_path):
    """Two launchers stand for two hosts; the one that serves the rendezvous is left."""
    run = tmp_path / "run"
    plan = run / "plan.json"
    arguments = [
        *("-m", "dlrm_sharded.ranks.torchrun", "--nnodes", "1:2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "a_job", "--max-restarts", "2"),
        *("--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        *("--rdzv-conf", "last_call_timeout=10,is_host={}"),
        *("-m", "dlrm_sharded.train", f"hydra.run.dir={run}", "sharder=dim", *SMALL_RUN),
        *("trainer.num_steps=200", "trainer.num_epochs=999", "trainer.checkpoint.every_steps=20"),
        *settings_of(Slow, folder=tmp_path),
    ]
    with (tmp_path / "log").open("w") as log:
        left, lost = (
            preloaded.start(
                *(word.format(is_host) for word in arguments),
                env=environment(),
                stdout=log,
                own_process=True,
            )
            for is_host in (True, False)
        )
        try:
            wait_until(
                lambda: plan.exists() and json.loads(plan.read_text())["world_size"] == 2,
                "both hosts have a plan",
            )
            wait_until(lambda: list(run.glob("checkpoints/step-*/manifest.json")), "a checkpoint")
            os.killpg(lost.pid, signal.SIGKILL)
            (tmp_path / "go").touch()
            exit_code = left.wait()
        finally:
            for host in (left, lost):
                if host.poll() is None:
                    os.killpg(host.pid, signal.SIGKILL)
    output = (tmp_path / "log").read_text()
    assert exit_code == 0, output
    assert "all ranks start again (restart 1)" in output
    assert "resuming at step" in output
    assert json.loads(plan.read_text())["world_size"] == 1
    assert result_of(run)["steps"] == 200
