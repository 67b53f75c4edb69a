"""Sweeps in rounds on a Slurm of two nodes: one job for all runs, which may be interrupted."""

import os
import signal

import pytest

from dlrm_sharded.runs.rounds import FILE_NAME, read_rounds
from tests.conftest import SMALL_RUN
from tests.e2e.runs import result_of
from tests.launch.conftest import jobs_of, states_of
from tests.processes import wait_until
from tests.slurm.test_torchx import sweep

pytestmark = pytest.mark.slow

RUNS = ["random_0", "size_1", "dim_2"]
ROUNDS = ["hydra.launcher.rounds=2", "round_steps=4", "sharder=random,size,dim"]
LONGER = ["trainer.num_steps=150", "trainer.checkpoint.every_steps=20"]


@pytest.mark.parametrize(
    ("end", "phase"),
    [
        ("job_cancelled", FILE_NAME),
        ("job_requeued", FILE_NAME),
        ("job_requeued", "checkpoints/step-*"),
        ("driver_killed", FILE_NAME),
    ],
    ids=["job_cancelled", "job_requeued", "job_requeued_in_training", "driver_killed"],
)
def test_an_interrupted_sweep_in_rounds_goes_on(end, phase, slurm, tmp_path):
    """Nothing is trained twice, and there is one job for all runs at a time."""
    sweep_dir = tmp_path / "sweep"
    in_training = phase != FILE_NAME
    command = sweep(sweep_dir, *SMALL_RUN, *ROUNDS, *(LONGER if in_training else []))
    process = slurm.popen(command, cwd=tmp_path)
    wait_until(lambda: list(sweep_dir.glob(f"{RUNS[0]}/{phase}")), f"there is {phase}")
    results = {path: path.stat().st_mtime_ns for path in sweep_dir.glob("*/result.json")}
    assert len(results) == (0 if in_training else len(RUNS))
    [app] = {job["app"] for job in jobs_of(sweep_dir)}
    job_id = app.rpartition("/")[2]
    match end:
        case "job_cancelled":
            slurm.cancel(job_id)
            assert "the same command makes the" in "".join(process.communicate())
        case "job_requeued":
            slurm.requeue(job_id)
            slurm.start_now(job_id)
            said = "".join(process.communicate())
        case "driver_killed":
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if end != "job_requeued":
        done = slurm.run(command, cwd=tmp_path)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert ("waiting for the job of all runs" in said) == (end == "driver_killed")
    else:
        assert process.returncode == 0, said
    assert states_of(sweep_dir) == ["succeeded"] * len(RUNS)
    assert {path: path.stat().st_mtime_ns for path in results} == results
    interruptions = [result_of(sweep_dir / run)["interruptions"] for run in RUNS]
    assert interruptions == [int(in_training), 0, 0]
    for run in RUNS:
        rounds = read_rounds(sweep_dir / run)
        assert sorted(rounds) == [0, 1]
        assert all(len(found.hosts) == 2 for found in rounds.values())
        lines = (sweep_dir / run / FILE_NAME).read_text().splitlines()
        assert sum('"attempt": 0' in line for line in lines) == 2
    [later] = {job["app"] for job in jobs_of(sweep_dir)}
    assert (later != app) == (end == "job_cancelled")
    for job in jobs_of(sweep_dir):
        assert "round 1: embedding cost" in (sweep_dir / job["log"]).read_text()
