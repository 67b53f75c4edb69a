"""A run's folder belongs to one job, and a job that does not train changes nothing in it."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.own_datasets import KillsItselfOnce, settings_of
from tests.e2e.runs import environment, events_of, result_of, train, train_alone

pytestmark = pytest.mark.slow

CHECKPOINTS = "checkpoints/step-*"
NUM_STEPS = 100


def contents(folder: Path) -> dict[Path, bytes]:
    """Files with what they hold, but for the log and the claim, which every start changes."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "train.log" and not path.name.startswith(".owner")
    }


def written_events(folder: Path) -> list[bytes]:
    return list(filter(None, (path.read_bytes() for path in folder.glob("events.out.tfevents.*"))))


def stopping(folder: Path, file: str) -> list[str]:
    return settings_of(KillsItselfOnce, folder=folder, file=file, number=int(signal.SIGSTOP))


@pytest.fixture
def living_run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str]"]:
    """A run that has written its first checkpoint, or begun if it writes none, and waits."""
    first, *overrides = getattr(
        request, "param", (CHECKPOINTS, "trainer.checkpoint.every_steps=10")
    )
    job = preloaded.start(
        *("-m", "dlrm_sharded.train", f"hydra.run.dir={tmp_path}", *SMALL_RUN),
        *(*overrides, f"trainer.num_steps={NUM_STEPS}"),
        *stopping(tmp_path, first),
        env=environment(),
        stderr=subprocess.PIPE,
        own_process=True,
    )
    try:
        _, status = os.waitpid(job.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "the job ended early"
        yield job
    finally:
        job.kill()
        job.communicate()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("resume", ["auto", "null"])
def test_a_second_job_writes_nothing(living_run, tmp_path, ranks, resume):
    before = contents(tmp_path)
    overrides = [*SMALL_RUN, f"resume={resume}", "seed=3"]
    start = train_alone if ranks == 1 else train  # torchrun knows 0 and 1
    done = start(tmp_path, *overrides, exit_code=2 if ranks == 1 else 1)
    lines = done.stderr.splitlines()
    [error] = [line for line in lines if "error" in line and "in progress" in line]
    assert f"process {living_run.pid} on " in error
    assert "Traceback" not in done.stderr.partition("torch/distributed")[0]
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "living_run",
    [
        (CHECKPOINTS, "trainer.checkpoint.every_steps=10"),
        ("run.json", "trainer.checkpoint.every_s=null"),
    ],
    ids=["checkpoints", "no_checkpoints"],
    indirect=True,
)
def test_a_run_that_was_taken_for_dead_writes_no_result(living_run, tmp_path):
    """Nor any checkpoint or event more; this one was stopped for a while."""
    kept = sorted(tmp_path.glob("checkpoints/step-*"))
    written = written_events(tmp_path)
    (tmp_path / ".owner").write_text("process 1 on another machine\n")
    os.kill(living_run.pid, signal.SIGCONT)
    _, errors = living_run.communicate()
    assert living_run.returncode == 1
    assert "was taken over by process" in errors
    assert "Traceback" not in errors
    assert sorted(tmp_path.glob("checkpoints/step-*")) == kept
    assert written_events(tmp_path) == written
    assert not (tmp_path / "result.json").exists()


def test_a_run_that_was_killed_goes_on_at_once(living_run, tmp_path):
    """A checkpoint without its files is renamed, so that it never counts again."""
    living_run.kill()
    living_run.wait()
    (tmp_path / "checkpoints" / "step-0000009999").mkdir()
    settings = ("resume=auto", f"trainer.num_steps={NUM_STEPS}", *stopping(tmp_path, CHECKPOINTS))
    done = train_alone(tmp_path, *SMALL_RUN, *settings)
    names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert sorted(names)[0] == "set-aside-step-0000009999"
    assert "step-0000009999" not in names
    assert "resuming at step" in done.stderr
    assert "which ended without releasing it" in done.output
    losses = events_of(tmp_path).Scalars("train/loss")
    assert [event.step for event in losses] == list(range(4, NUM_STEPS + 1, 4))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("seed=4", "seed is 4"),
        ("data.seed=9", "data.seed is 9 and was 3"),
        ("resume=never", "already has a run"),
        ("sharder._target_=no.such.Sharder", "no.such.Sharder"),
    ],
)
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(run_dir, override, reason, tmp_path):
    folder = shutil.copytree(run_dir, tmp_path / "run")  # a refusal is in the log of the run
    before = contents(folder)
    done = train_alone(folder, *SMALL_RUN, "seed=3", "resume=auto", override, exit_code=2)
    assert reason in done.stderr
    assert contents(folder) == before


def test_a_run_that_is_finished_keeps_its_result(tmp_path):
    train_alone(tmp_path, *SMALL_RUN)
    before = contents(tmp_path)
    done = train_alone(tmp_path, *SMALL_RUN, "resume=auto")
    assert "and its result stays" in done.output
    assert contents(tmp_path) == before


BEST = (
    *("trainer.checkpoint.every_steps=4", "trainer.checkpoint.keep=1", "trainer.keep_best=auroc"),
    *("trainer.eval_every_steps=2", "trainer.patience=4", "optimizer.embedding=sgd"),
    *("optimizer.embedding_learning_rate=1e-30", "optimizer.dense_learning_rate=1e-30"),
)
"""Weights stay as they are, so that no evaluation is better than the first one, after two steps."""


def test_a_run_that_patience_has_ended_is_finished(tmp_path):
    """Another run does not take its best checkpoint for one of its own."""
    run, other = tmp_path / "run", tmp_path / "other"
    done = train_alone(run, *SMALL_RUN, *BEST)
    assert "the training ends after step 10: trainer.patience=4" in done.output
    assert "best auroc 0." in done.output.rpartition("done: sharder")[2]
    assert result_of(run)["steps"] == 10
    for tag in ("auroc", "normalized_entropy", "loss", "calibration"):
        values = [event.value for event in events_of(run).Scalars(f"eval/{tag}")]
        assert values == [pytest.approx(values[0])] * 5, tag
    assert [path.name[-2:] for path in sorted((run / "checkpoints").iterdir())] == ["02", "10"]
    before = contents(run)
    again = train_alone(run, *SMALL_RUN, *BEST, "resume=auto")
    assert (
        "has ended at step 10, and its result stays; to continue, raise trainer.p" in again.output
    )
    assert contents(run) == before
    train_alone(other, *SMALL_RUN, *BEST, f"resume={run}", "trainer.num_steps=14")
    assert result_of(other)["steps"] == 14
    assert [path.name[-2:] for path in sorted((other / "checkpoints").iterdir())] == ["12", "14"]


def test_evaluations_cannot_be_compared_without_validation_data(tmp_path):
    done = train_alone(tmp_path, *SMALL_RUN, *BEST, "data.num_val_batches=0", exit_code=2)
    assert "trainer.keep_best compares evaluations, and there is no batch to eval" in done.stderr
