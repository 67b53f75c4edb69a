"""`torchx run -s slurm` and sweeps on a Slurm of two nodes."""

import csv
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import SMALL_RUN
from tests.e2e.own_datasets import Slow, settings_of
from tests.e2e.runs import result_of
from tests.launch.conftest import LISTENING, jobs_of, states_of
from tests.preloaded import ROOT
from tests.processes import wait_until
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slow

TORCHX = str(Path(sys.executable).with_name("torchx"))
COMPONENT = f"{ROOT / 'launch' / 'component.py'}:train"
TWO_NODES = ["-j", "2x1", "--gpu", "0", "--cpu", "1"]
TRAIN = ("-m", "dlrm_sharded.train")
SLURM = ["hydra.launcher.scheduler=slurm", "hydra.launcher.poll_s=0.2"]
NODES = ["hydra.launcher.j=2x1", "hydra.launcher.gpu=0", "hydra.launcher.cpu=1"]
SMALL_STEPS = ["data.max_rows=500", "batch_size=256"]
LONG = ["trainer.num_steps=100000", *SMALL_STEPS]
SLOW_STEPS = 200
"""With slow data, Slurm takes the nodes away before the training ends, on a fast machine, too."""


def torchx(slurm: Cluster, cwd: Path, *arguments: str) -> str:
    done = slurm.run([TORCHX, *arguments], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def submit(slurm: Cluster, cwd: Path, *overrides: str) -> str:
    """The handle of a job on both nodes."""
    said = torchx(slurm, cwd, "run", "-s", "slurm", COMPONENT, *TWO_NODES, *overrides)
    (handle,) = (line for line in said.splitlines() if line.startswith("slurm://"))
    return handle


def sweep(sweep_dir: Path, *overrides: str, program: Sequence[str] = TRAIN) -> list[str]:
    arguments = ["-m", f"hydra.sweep.dir={sweep_dir}", *SLURM, *NODES, *overrides]
    return [sys.executable, *program, *arguments]


def application_sweep(application: Path, folder: Path, *overrides: str) -> list[str]:
    launcher = ("hydra/launcher=torchx", f"+folder={folder}")
    return sweep(folder / "sweep", *launcher, *overrides, program=[str(application)])


def state(slurm: Cluster, cwd: Path, handle: str) -> str:
    text = torchx(slurm, cwd, "status", handle)
    return text.partition("State: ")[2].split()[0]


def test_run_status_log(slurm, tmp_path):
    handle = submit(slurm, tmp_path, *SMALL_RUN, "sharder=dim", "hydra.run.dir=run")
    wait_until(lambda: state(slurm, tmp_path, handle) == "SUCCEEDED", "the job has ended")
    assert result_of(tmp_path / "run")["world_size"] == 2
    task = json.loads((tmp_path / "run" / "task.json").read_text())
    assert task["topology"]["local_world_size"] == 1  # a rank on each of two hosts
    log = torchx(slurm, tmp_path, "log", handle)
    assert "train/0" in log
    assert "embedding cost" in log
    assert not list(tmp_path.glob("slurm-*")), "output belongs below runs/slurm"
    assert list((tmp_path / "runs" / "slurm").glob("slurm-*-train-1.err"))


def test_cancel(slurm, tmp_path):
    handle = submit(slurm, tmp_path, *LONG, "hydra.run.dir=run")
    wait_until(lambda: (tmp_path / "run" / "plan.json").exists(), "the job trains")
    assert state(slurm, tmp_path, handle) == "RUNNING"
    assert "2 ranks" in torchx(slurm, tmp_path, "log", handle)
    torchx(slurm, tmp_path, "cancel", handle)
    wait_until(lambda: state(slurm, tmp_path, handle) == "CANCELLED", "it is cancelled")
    # In the accounting too, where TorchX itself does not know the word.
    wait_until(
        lambda: set(slurm.states(handle.rpartition("/")[2])) == {"CANCELLED by 0"},
        "it is accounted",
    )
    assert state(slurm, tmp_path, handle) == "CANCELLED"


def test_what_slurm_refuses_is_one_message(slurm, tmp_path):
    """GPUs, which the cluster does not have; a job with more cores than its nodes would wait."""
    options = ["-j", "1x2", "--cpu", "4"]
    done = slurm.run([TORCHX, "run", "-s", "slurm", COMPONENT, *options], cwd=tmp_path)
    assert done.returncode == 1
    assert "sbatch refused the job" in done.stderr
    assert "gpu=0" in done.stderr
    assert "Traceback" not in done.stderr


def test_sweep(slurm, tmp_path):
    sweep_dir = tmp_path / "sweep"
    command = sweep(sweep_dir, *SMALL_RUN, "sharder=random,dim")
    done = slurm.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = jobs_of(sweep_dir)
    assert [job["state"] for job in jobs] == ["succeeded", "succeeded"]
    assert len({job["app"] for job in jobs}) == 2
    for job in jobs:
        result = result_of(sweep_dir / job["folder"])
        assert result["sharder"] == job["choices"]["sharder"]
        assert result["world_size"] == 2
        assert "embedding cost" in (sweep_dir / job["log"]).read_text()
    with (sweep_dir / "summary.csv").open() as file:
        assert [row["succeeded"] for row in csv.DictReader(file)] == ["1", "1"]


def test_sweep_says_what_was_cancelled(slurm, tmp_path):
    sweep_dir = tmp_path / "sweep"
    process = slurm.popen(sweep(sweep_dir, *LONG, "sharder=random"), cwd=tmp_path)
    wait_until(lambda: (sweep_dir / "random_0" / "plan.json").exists(), "the job trains")
    slurm.cancel(jobs_of(sweep_dir)[0]["app"].rpartition("/")[2])
    _, said = process.communicate()
    assert process.returncode == 1
    assert states_of(sweep_dir) == ["cancelled"]
    assert "#0 random_0: cancelled: CANCELLED" in said
    assert "random_0: cancelled" in (sweep_dir / "summary.md").read_text()


def test_stopping_a_sweep_cancels_its_jobs(slurm, tmp_path):
    sweep_dir = tmp_path / "sweep"
    command = [*LISTENING, *sweep(sweep_dir, *LONG, "sharder=random,dim")]
    process = slurm.popen(command, cwd=tmp_path)
    wait_until(lambda: (sweep_dir / "random_0" / "plan.json").exists(), "the first one trains")
    # Both are submitted at once; the second waits for the nodes' memory.
    assert any("jobs wait in the queue (Resources)" in line for line in process.stdout)
    wait_until(lambda: states_of(sweep_dir) == ["running", "pending"], "one runs, one waits")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert states_of(sweep_dir) == ["cancelled", "cancelled"]
    for job in jobs_of(sweep_dir):
        slurm.wait_for(job["app"].rpartition("/")[2], "CANCELLED", components=2)


def test_environment_arrives_whole(slurm, tmp_path, application):
    """Commas end a value of srun's --export, and TorchX looks for ${...} in it."""
    value = "eth0,eth1 $HOME $$ a=b"
    overrides = ["+do=write_environment", f"hydra.launcher.env={{VALUE: '{value}'}}"]
    done = slurm.run(application_sweep(application, tmp_path, *overrides), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"value_{rank}").read_text() for rank in (0, 1)] == [value] * 2


def test_slurm_starts_a_failed_job_again(slurm, tmp_path, application):
    sweep_dir = tmp_path / "sweep"
    overrides = ["+do=succeed_at_second", "hydra.launcher.max_retries=1"]
    process = slurm.popen(application_sweep(application, tmp_path, *overrides), cwd=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("first_*"))) == 2, "the ranks have failed once")
    job_id = jobs_of(sweep_dir)[0]["app"].rpartition("/")[2]
    slurm.start_now(job_id)
    said, failed = process.communicate()
    assert process.returncode == 0, said + failed
    assert states_of(sweep_dir) == ["succeeded"]


def test_preempted(slurm, tmp_path):
    """A job that Slurm runs again goes on in the middle of its training."""
    sweep_dir = tmp_path / "sweep"
    overrides = ["sharder=dim", "hydra.launcher.scheduler_args={partition: low}"]
    overrides += [f"trainer.num_steps={SLOW_STEPS}", "trainer.checkpoint.every_steps=20"]
    overrides += [*SMALL_STEPS, *settings_of(Slow, folder=tmp_path)]
    process = slurm.popen(sweep(sweep_dir, *overrides), cwd=tmp_path)
    wait_until(lambda: list((sweep_dir / "dim_0").glob("checkpoints/step-*")), "the job trains")
    job_id = jobs_of(sweep_dir)[0]["app"].rpartition("/")[2]
    slurm.preempt()
    slurm.wait_for(job_id, "PENDING", components=2)
    slurm.start_now(job_id)
    (tmp_path / "go").touch()
    said, failed = process.communicate()
    assert process.returncode == 0, said + failed
    assert states_of(sweep_dir) == ["succeeded"]
    result = result_of(sweep_dir / "dim_0")
    assert (result["interruptions"], result["steps"]) == (1, SLOW_STEPS)
    assert "resuming at step" in (sweep_dir / "dim_0" / "train.log").read_text()
