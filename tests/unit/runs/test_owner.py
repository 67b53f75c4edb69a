"""A folder has one owner, however the one before has ended and wherever it was."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from dlrm_sharded.files.errors import ConfigError, LostFolderError
from dlrm_sharded.runs import owner as owner_module
from dlrm_sharded.runs.owner import claim
from tests.unit.ranks.test_attempt import JOB_VARIABLES

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def no_job_and_little_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in JOB_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(owner_module, "SILENCE_S", 0.6)
    monkeypatch.setattr(owner_module, "SIGN_OF_LIFE_S", 0.05)
    monkeypatch.setattr(owner_module, "END_S", 0.6)
    yield
    for held in list(owner_module._held.values()):
        held.release()


def _claim_and_wait(folder: Path, end: Connection) -> None:
    owner_module._held.clear()
    try:
        claim(folder)
    except ConfigError as error:
        end.send(str(error))
        return
    end.send("owns")
    end.recv()
    os._exit(0)  # without a word, as a process that is killed


class Other:
    """Another process that claims a folder; `answer` is "owns", or why it does not."""

    def __init__(self, folder: Path) -> None:
        self._end, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_claim_and_wait, args=(folder, theirs), daemon=True)
        self._process.start()

    @property
    def answer(self) -> str:
        return str(self._end.recv())

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def owner_of(folder: Path) -> Other:
    process = Other(folder)
    assert process.answer == "owns"
    return process


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    process = owner_of(tmp_path)
    yield process
    process.kill()


def rewrite_claim(run_dir: Path, **changes: Any) -> None:
    path = max(run_dir.glob(".owner-*"))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_owner_may_claim_again_and_others_may_after_it(tmp_path):
    mine = claim(tmp_path)
    assert claim(tmp_path / "." / "x" / "..") is mine
    mine.check()
    mine.release()
    mine.release()
    owner_of(tmp_path).kill()


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_living_owner_is_named_and_nothing_is_written(other, is_stopped, tmp_path):
    if is_stopped:
        os.kill(other.pid, signal.SIGSTOP)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=rf"process {other.pid} on \S+, since 2\d{{3}}-"):
        claim(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_an_owner_that_was_killed_is_followed_at_once(other, tmp_path, monkeypatch):
    monkeypatch.setattr(owner_module, "SILENCE_S", 1e9)
    other.kill()
    claim(tmp_path).check()


def test_a_number_that_another_process_has_meanwhile_is_not_the_owner(other, tmp_path):
    rewrite_claim(tmp_path, started_ticks=1)
    claim(tmp_path)


def test_a_slow_contender_does_not_own_a_number_that_is_free_again(other, tmp_path, monkeypatch):
    """Since it looked, so many have owned the folder that the first claims are removed."""
    (tmp_path / ".owner-1").rename(tmp_path / ".owner-12")
    newest, before = owner_module._newest, iter([0])
    monkeypatch.setattr(owner_module, "_newest", lambda folder: next(before, newest(folder)))
    with pytest.raises(ConfigError, match=f"process {other.pid} on "):
        claim(tmp_path)


@pytest.mark.parametrize("where", ["another host", "other processes in /proc"])
def test_elsewhere_signs_of_life_decide(where, other, tmp_path, monkeypatch):
    if where == "another host":
        rewrite_claim(tmp_path, boot="that of another host")
    else:
        monkeypatch.setattr(owner_module, "sees_processes", lambda: False)
    with pytest.raises(ConfigError, match="in progress"):
        claim(tmp_path)
    other.kill()
    claim(tmp_path)


def test_an_owner_taken_for_dead_is_told_when_it_wakes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(owner_module, "SIGN_OF_LIFE_S", 1e6)
    mine = claim(tmp_path)
    rewrite_claim(tmp_path, boot="that of another host")
    other = owner_of(tmp_path)
    with pytest.raises(LostFolderError, match=f"taken over by process {other.pid}"):
        mine.check()
    other.kill()


def test_a_former_attempt_of_the_same_job_has_ended_on_its_host(other, tmp_path, monkeypatch):
    monkeypatch.setattr(owner_module, "SILENCE_S", 1e9)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    rewrite_claim(tmp_path, boot="that of another host", job="12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    with pytest.raises(ConfigError):  # the same number, but no restart: another cluster's
        claim(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    claim(tmp_path)


def test_a_former_attempt_on_this_host_is_waited_for(other, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    rewrite_claim(tmp_path, job="7")
    with pytest.raises(ConfigError, match="in progress"):
        claim(tmp_path)
    monkeypatch.setattr(owner_module, "END_S", 60)
    killer = threading.Thread(target=lambda: (time.sleep(0.3), other.kill()))
    killer.start()
    claim(tmp_path)
    killer.join()


@pytest.mark.parametrize("path", ["/data/run", "no\0path"])
def test_a_living_owner_may_know_the_folder_by_another_path(path, other, tmp_path):
    """As in a container that has the folder elsewhere, beside the same processes."""
    rewrite_claim(tmp_path, folder=path)
    with pytest.raises(ConfigError, match="in progress"):
        claim(tmp_path)


def test_a_folder_that_was_removed_may_be_anothers(tmp_path):
    folder = tmp_path / "run"
    mine = claim(folder)
    shutil.rmtree(folder)
    other = owner_of(folder)
    with pytest.raises(LostFolderError, match=rf"by process {other.pid} .* claim was removed"):
        mine.check()
    mine.release()
    with pytest.raises(ConfigError, match=f"process {other.pid}"):
        claim(folder)
    other.kill()


@pytest.mark.parametrize("with_its_folder", [False, True])
def test_a_claim_that_was_removed_is_made_again(with_its_folder, tmp_path):
    folder = tmp_path / "run"
    mine = claim(folder)
    (folder / ".owner-1").unlink()
    if with_its_folder:
        folder.rmdir()
    mine.check()
    assert Other(folder).answer.endswith("or give another hydra.run.dir")
    mine.check()


def test_one_of_many_contenders_follows(tmp_path):
    for _ in range(12):
        first = owner_of(tmp_path)
        first.kill()
        contenders = [Other(tmp_path) for _ in range(6)]
        answers = [contender.answer for contender in contenders]
        assert answers.count("owns") == 1, answers
        for contender in contenders:
            contender.kill()
    numbers = owner_module._numbers(tmp_path)
    assert max(numbers) == 24
    assert len(numbers) <= owner_module.KEPT_CLAIMS


CONTENDER = """
import sys
from pathlib import Path
from tests.unit.runs.test_owner import Other, owner_module, owner_of

owner_module.SILENCE_S, owner_module.SIGN_OF_LIFE_S = 5.0, 0.05
folder = Path(sys.argv[1])
first = owner_of(folder) if sys.argv[2] == "--pid" else None
print(Other(folder).answer)
if first is not None:
    first.kill()
    print(Other(folder).answer)
"""


@pytest.mark.parametrize("kind", ["--pid", "--time"])
def test_a_living_owner_in_odd_namespaces(kind, tmp_path):
    """One has the /proc of other processes; in the other, processes seem to begin later."""
    unshare = ["unshare", "--user", "--map-root-user", "--fork", kind]
    if kind == "--time":
        unshare += ["--boottime", "100000"]
        first = owner_of(tmp_path)
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not allow such a namespace")
    command = [*unshare, sys.executable, "-c", CONTENDER, str(tmp_path), kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    living, *killed = done.stdout.splitlines()
    assert "belongs to a job that is in progress" in living
    if kind == "--time":
        first.kill()
    else:
        assert killed == ["owns"]


@pytest.mark.parametrize("pid", [10**30, 0, "1"])
def test_a_claim_of_no_process_holds_nobody(pid, tmp_path):
    """It says of no process that it lives, so that its signs of life decide."""
    owner_of(tmp_path).kill()
    rewrite_claim(tmp_path, pid=pid)
    claim(tmp_path).check()
