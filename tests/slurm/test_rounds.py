"""Sweeps in rounds on a Slurm of two nodes: one job for all runs, which may be interrupted."""

import os
import signal

import pytest

from dlrm_sharded.runs.rounds import FILE_NAME, read_rounds
from tests.conftest import SMALL_RUN
from tests.e2e.own_datasets import Slow, settings_of
from tests.e2e.runs import result_of
from tests.launch.conftest import jobs_of, states_of
from tests.processes import wait_until
from tests.slurm.test_torchx import SLOW_STEPS, sweep

pytestmark = pytest.mark.slow

RUNS = ["random_0", "dim_1"]
ROUNDS = ["round_steps=4", "sharder=random,dim"]
LONGER = [f"trainer.num_steps={SLOW_STEPS}", "trainer.checkpoint.every_steps=20"]


@pytest.mark.parametrize("is_requeued", [True, False], ids=["job_requeued", "driver_killed"])
def test_an_interrupted_sweep_in_rounds_goes_on(is_requeued, slurm, tmp_path):
    """Nothing is trained twice, and there is one job for all runs at a time.

    The job is requeued in its training; the driver is killed in the rounds.
    """
    sweep_dir = tmp_path / "sweep"
    phase = "checkpoints/step-*" if is_requeued else FILE_NAME
    num_rounds, longer = (2, LONGER) if is_requeued else (4, [])
    words = [f"hydra.launcher.rounds={num_rounds}", *longer, *settings_of(Slow, folder=tmp_path)]
    command = sweep(sweep_dir, *SMALL_RUN, *ROUNDS, *words)
    process = slurm.popen(command, cwd=tmp_path)
    wait_until(lambda: list(sweep_dir.glob(f"{RUNS[0]}/{phase}")), f"there is {phase}")
    results = {path: path.stat().st_mtime_ns for path in sweep_dir.glob("*/result.json")}
    assert len(results) == (0 if is_requeued else len(RUNS))
    [app] = {job["app"] for job in jobs_of(sweep_dir)}
    if is_requeued:
        slurm.requeue(app.rpartition("/")[2])
        slurm.start_now(app.rpartition("/")[2])
    else:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        process = slurm.popen(command, cwd=tmp_path)
        assert any(f"waiting for {app}" in line for line in process.stdout)
    (tmp_path / "go").touch()
    said = "".join(process.communicate())
    assert process.returncode == 0, said
    assert states_of(sweep_dir) == ["succeeded"] * len(RUNS)
    assert {path: path.stat().st_mtime_ns for path in results} == results
    interruptions = [result_of(sweep_dir / run)["interruptions"] for run in RUNS]
    assert interruptions == [int(is_requeued), 0]
    for run in RUNS:
        rounds = read_rounds(sweep_dir / run)
        assert sorted(rounds) == [*range(num_rounds)]
        assert all(len(found.hosts) == 2 for found in rounds.values())
        lines = (sweep_dir / run / FILE_NAME).read_text().splitlines()
        assert sum('"attempt": 0' in line for line in lines) == num_rounds
    assert {job["app"] for job in jobs_of(sweep_dir)} == {app}
    for job in jobs_of(sweep_dir):
        assert "round 2: embedding cost" in (sweep_dir / job["log"]).read_text()
