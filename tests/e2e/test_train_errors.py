"""Runs that cannot go on: one message, the exit code, nothing that looks like a result."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.runs import command, environment, kinds_of_files, train, train_alone
from tests.processes import children_of

pytestmark = pytest.mark.slow

OWN_DATASETS = Path(__file__).parent
LEFT = {"config", "hydra", "overrides", "train"}
"""Of a run that did not begin: the log, and what Hydra writes."""


def refusal(done: preloaded.Ended) -> str:
    """The message, once, of ranks that end with 2, under torchrun, which ends with 1."""
    assert "exitcode  : 2" in done.stderr
    assert "exitcode  : 1 " not in done.stderr
    ours = done.stderr.split("Traceback")[0]  # torchrun's own follows
    assert ours.count("error: ") == 1, done.stderr
    return ours[ours.index("error: ") :]


BAD_INPUT = {
    "sharder": (["sharder=nope"], ["nope", "size_lookup", "torchrec"]),
    "huge_table": (["topology.memory_gib=0.0001"], ["no plan can fit", "topology.memory_gib"]),
    "no_tables": (["data.tables._target_=builtins.tuple"], ["data.tables has no tables"]),
    "batch_size": (["batch_size=255"], ["batch_size is 255", "2 ranks"]),
    "plan_file": (["sharder=plan_file", "sharder.path=none.json"], ["plan file none.json"]),
    "nan": (
        ["optimizer.dense_learning_rate=1e30", "optimizer=sgd", "trainer.log_every_steps=4"],
        ["the loss is", "at step"],
    ),
    "kind": (["trainer.num_steps=abc"], ["trainer.num_steps is 'abc'", "integer"]),
    "ids": (
        ["data._target_=own_datasets.OutOfRange", "data.bounds=error"],
        ["feature 't000' of table 't000'", "has ids beyond its", "in training batch 1"],
    ),
    "negative": (
        ["data._target_=own_datasets.NegativeOnRankOne", "trainer.log_every_steps=4"],
        ["has ids below 0 (1, down to -7), at step"],
    ),
    "bounds": (["data.bounds=raise"], ["data.bounds is 'raise'; known: warn, error, ignore"]),
    "memory": (["batch_size=200000000"], ["needs", "GiB are available", "lower batch_size"]),
}


ON_RANKS = ("sharder", "batch_size", "plan_file", "nan", "ids", "negative", "memory")
"""These need two ranks, which find them apart; one process refuses the rest alike."""


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(name, tmp_path):
    """One message, from one rank; the ranks end with 2; nothing that looks like a result."""
    overrides, expected = BAD_INPUT[name]
    small = [o for o in SMALL_RUN if name != "no_tables" or "data." not in o]
    if name in ON_RANKS:
        done = train(tmp_path / "run", *small, *overrides, python_path=OWN_DATASETS, exit_code=1)
        message = refusal(done)
    else:
        done = train_alone(tmp_path / "run", *small, *overrides, exit_code=2)
        message = done.stderr[done.stderr.index("error: ") :]
        assert message.count("error: ") == 1, done.stderr
    for words in expected:
        assert words in message
    left = kinds_of_files(tmp_path / "run") - LEFT
    assert left <= {"events", "memory", "plan", "prices", "run", "task"}
    assert not left or name in ("nan", "ids", "negative", "memory")


def test_a_run_folder_that_cannot_be_made(tmp_path):
    """Rank 0 alone makes it; the others learn of it instead of waiting for rank 0."""
    (tmp_path / "file").touch()
    run_dir = tmp_path / "file" / "run"
    done = train(run_dir, *SMALL_RUN, "sharder=dim", launcher="ours", exit_code=2)
    assert done.stderr.splitlines() == [f"error: Not a directory: {run_dir}"]


@pytest.mark.parametrize("where", ["init", "batch"])
def test_error_of_one_rank(where, tmp_path):
    """It ends both ranks, long before a collective's timeout, with the message of the one."""
    done = train(
        tmp_path / "run",
        *SMALL_RUN,
        "data._target_=own_datasets.FailingOnRankOne",
        f"+data.where={where}",
        "data.pregenerate=false",
        python_path=OWN_DATASETS,
        launcher="ours",
        exit_code=2,
    )
    assert "error on rank 1: the file of rank one is cut" in done.stderr
    # rank 0 may draw its progress bar, or end it with a newline, after rank 1 has failed
    lines = [line for line in done.stderr.splitlines() if line and "step/s" not in line]
    assert lines[-1].endswith("rank 1: the file of rank one is cut")
    if where == "init":
        assert done.stderr.count("the file of rank one is cut") == 1
    assert not (tmp_path / "run/result.json").exists()


def test_lost_rank_ends_the_job(tmp_path):
    """A rank that dies takes the others with it within seconds, not after a timeout."""
    overrides = [f"hydra.run.dir={tmp_path}", *SMALL_RUN, "trainer.num_steps=100000"]
    job = preloaded.start(*command(2), *overrides, env=environment(), own_process=True)
    try:
        while not list(tmp_path.glob("plan.json")):
            assert job.poll() is None, "the job ended early"
            time.sleep(0.2)
        workers = children_of(job.pid)
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        job.communicate()
        assert job.returncode == 1
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
