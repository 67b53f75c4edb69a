"""A folder has one owner, however the one before has ended and wherever it was."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dlrm_sharded.files.errors import ConfigError, LostFolderError
from dlrm_sharded.runs import owner as owner_module
from dlrm_sharded.runs.owner import claim

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(owner_module, "SILENCE_S", 0.6)
    monkeypatch.setattr(owner_module, "SIGN_OF_LIFE_S", 0.05)
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


def be_elsewhere(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Let this process be on another machine, whose locks this one has not, or have no locks."""

    def flock(*_: object) -> None:
        if where == "no_locks":
            raise OSError

    monkeypatch.setattr(fcntl, "flock", flock)
    if where == "another_machine":
        monkeypatch.setattr(owner_module, "_boot", lambda: b"\nthat of another machine\n")


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
    before = [(path, path.read_bytes()) for path in tmp_path.iterdir()]
    with pytest.raises(ConfigError, match=rf"process {other.pid} on \S+, since 2\d{{3}}-"):
        claim(tmp_path)
    assert [(path, path.read_bytes()) for path in tmp_path.iterdir()] == before


def test_an_owner_that_was_killed_is_followed_at_once(other, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(owner_module, "SILENCE_S", 1e9)
    other.kill()
    claim(tmp_path).check()
    assert f"is taken over from process {other.pid} on " in caplog.text


@pytest.mark.parametrize("where", ["another_machine", "no_locks"])
def test_elsewhere_signs_of_life_decide(where, other, tmp_path, monkeypatch):
    be_elsewhere(monkeypatch, where)
    with pytest.raises(ConfigError, match=f"in progress: process {other.pid}"):
        claim(tmp_path)
    other.kill()
    claim(tmp_path)


def test_an_owner_taken_for_dead_is_told_when_it_wakes(tmp_path, monkeypatch):
    monkeypatch.setattr(owner_module, "SIGN_OF_LIFE_S", 1e6)
    mine = claim(tmp_path)
    be_elsewhere(monkeypatch, "another_machine")
    other = owner_of(tmp_path)
    with pytest.raises(LostFolderError, match=f"taken over by process {other.pid}"):
        mine.check()
    mine.release()
    assert (tmp_path / owner_module.FILE_NAME).read_bytes(), "it is the other one's"
    other.kill()


def test_a_folder_that_was_removed_may_be_anothers(tmp_path):
    folder = tmp_path / "run"
    mine = claim(folder)
    shutil.rmtree(folder)
    other = owner_of(folder)
    with pytest.raises(LostFolderError, match=rf"by process {other.pid} .* file was removed"):
        mine.check()
    mine.release()
    with pytest.raises(ConfigError, match=f"process {other.pid}"):
        claim(folder)
    other.kill()


@pytest.mark.parametrize("with_its_folder", [False, True])
def test_a_file_that_was_removed_is_made_again(with_its_folder, tmp_path):
    folder = tmp_path / "run"
    mine = claim(folder)
    (folder / owner_module.FILE_NAME).unlink()
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


def test_a_child_of_an_owner_keeps_nothing(tmp_path):
    """Else a worker that outlives a killed rank would hold the folder."""
    mine = claim(tmp_path)
    child = FORK.Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    mine._file.close()
    owner_of(tmp_path).kill()
    child.kill()


@pytest.mark.parametrize("found", [b"\xff\0", b'{"pid": 1}\n'], ids=["damaged", "of_02"])
def test_what_is_no_claim_holds_nobody(found, tmp_path):
    """Nobody touches it."""
    (tmp_path / owner_module.FILE_NAME).write_bytes(found)
    claim(tmp_path).check()
