import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from dlrm_sharded.datasets.build_once import build_once


def is_complete(folder: Path) -> bool:
    return (folder / "done").is_file()


def build(folder: Path) -> None:
    assert list(folder.iterdir()) == []
    with (folder.parent / "builds").open("a") as log:
        log.write("x")
    for i in range(5):
        (folder / f"part_{i}").write_text(str(os.getpid()))
        time.sleep(0.01)
    (folder / "done").touch()


def build_and_hang(folder: Path) -> None:
    (folder / "part_0").touch()
    (folder / "sub").mkdir()
    (folder / "done").touch()
    (folder.parent / "hangs").touch()
    time.sleep(60)


def make(folder: Path, how=build) -> None:
    build_once(folder, is_complete=is_complete, build=how)


def test_builds_once_and_leaves_nothing_else(tmp_path):
    folder = tmp_path / "deep" / "folder"
    make(folder)
    make(folder)
    assert (tmp_path / "deep" / "builds").read_text() == "x"
    assert {path.name for path in folder.iterdir()} == {"done", *(f"part_{i}" for i in range(5))}
    assert {path.name for path in folder.parent.iterdir()} == {"builds", "folder"}


def test_a_failed_build_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "done").touch()
        raise LookupError

    with pytest.raises(LookupError):
        make(tmp_path / "folder", fail)
    assert list(tmp_path.iterdir()) == []


def test_several_processes_build_once(tmp_path):
    folder = tmp_path / "folder"
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=make, args=(folder,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "builds").read_text() == "x"
    assert len({(folder / f"part_{i}").read_text() for i in range(5)}) == 1
    assert not (tmp_path / "folder.partial").exists()


def test_what_a_killed_process_left_is_there_for_the_next_one(tmp_path):
    folder = tmp_path / "folder"
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=make, args=(folder, build_and_hang))
    process.start()
    while not (tmp_path / "hangs").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not folder.exists()
    assert (tmp_path / "folder.partial" / "done").exists()
    left = []

    def go_on(partial: Path) -> None:
        left.extend(path.name for path in partial.iterdir())

    build_once(folder, is_complete=lambda path: path.is_dir(), build=go_on)
    assert "done" in left
    assert not (tmp_path / "folder.partial").exists()
