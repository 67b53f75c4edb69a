"""Attempts of a job share the time of its first start; every other job has its own."""

import os
from pathlib import Path

import pytest

from dlrm_sharded.ranks.attempt import STARTED_FOLDER, is_restart, job_id, started

FORMAT = "%Y-%m-%d_%H-%M-%S-%f"
JOB_VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "DLRM_SHARDED_RESTARTS"),
    *("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
)


@pytest.fixture(autouse=True)
def no_job_in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in JOB_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_process_of_its_own_remembers_nothing():
    assert job_id() is None
    assert started(FORMAT) != started(FORMAT)
    assert not STARTED_FOLDER.exists()


@pytest.mark.parametrize("job", ["12", "none", "../../etc/passwd"])
@pytest.mark.parametrize("count", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_finds_its_first_start(job, count, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    first = started(FORMAT)
    monkeypatch.setenv(count, "1")
    assert is_restart()
    assert started(FORMAT) == first
    assert [path.parent for path in tmp_path.rglob("*") if path.is_file()] == [
        tmp_path / STARTED_FOLDER
    ]


def test_another_job_has_another_time(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "12")
    first = started(FORMAT)
    assert started(FORMAT) != first, "an identifier that is used again, by a new job"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "13")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = started(FORMAT)
    assert second != first, "a restart that finds no file"
    assert started(FORMAT) == second


def test_torchruns_default_is_told_apart_by_its_process(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    job = job_id()
    assert job == job_id()
    assert str(os.getppid()) in job
