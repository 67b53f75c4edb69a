"""Files are replaced completely or not at all; streams are written through."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import (
    check_file_to_write,
    folder_to_write,
    replace_file,
    replaced_file,
    write_json,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with something of every kind."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("old")
    Path("folder").mkdir()
    for link, target in {
        "link": "file",
        "link_to_link": "link",
        "dangling": "folder/new",
        "lost": "missing/new",
        "link_to_folder": "folder",
    }.items():
        Path(link).symlink_to(target)
    os.mkfifo("pipe")
    return tmp_path


def kinds(folder: Path) -> dict[str, tuple[int, int]]:
    """The type and the inode of everything in a folder; a new inode is another file."""
    found = {path.name: path.lstat() for path in folder.iterdir()}
    return {name: (stat.S_IFMT(of.st_mode), of.st_ino) for name, of in found.items()}


@pytest.mark.parametrize("link", ["link", "link_to_link", "dangling"])
def test_the_file_that_a_link_points_to_is_replaced(folder, link):
    before = kinds(folder)
    replace_file(link, b"new")
    assert Path(link).resolve().read_bytes() == b"new"
    after = kinds(folder)
    assert [name for name in before if after[name] != before[name] and name != "file"] == []
    assert after.keys() == before.keys()


def test_a_pipe_is_written_through(folder):
    """More than fits into a pipe at once, so that the writer has to wait for the reader."""
    before = kinds(folder)
    with tempfile.TemporaryFile() as output:
        reader = subprocess.Popen(["cat", "pipe"], stdout=output)
        with Path("pipe").open("wb"):  # waits for the reader
            replace_file("pipe", bytes(2**20))
        assert reader.wait(60) == 0
        output.seek(0)
        assert output.read() == bytes(2**20)
    assert kinds(folder) == before


def rows(messages: dict[str, tuple[object, ...]]) -> list[tuple[object, str]]:
    return [(path, message) for message, paths in messages.items() for path in paths]


UNWRITABLE: dict[str, tuple[object, ...]] = {
    "Is a directory": ("folder", "link_to_folder", "."),
    "No such file or directory": ("lost",),
    "Not a directory": ("file/new",),
}


@pytest.mark.parametrize(("path", "message"), rows(UNWRITABLE))
def test_what_cannot_be_written_is_refused(folder, path, message):
    before = kinds(folder)
    with pytest.raises(ConfigError, match=f"^cannot write {path}: {message}"):
        write_json(path, {})
    assert kinds(folder) == before


@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_standard_output_is_written_through(tmp_path, path):
    """Also where it is a file that a shell's >> appends to."""
    (tmp_path / "log").write_text("before ")
    program = (
        "from dlrm_sharded.files.json_files import replace_file\n"
        f"print('printed', end=' ')\nreplace_file({path!r}, b'new ')\nprint('after')"
    )
    with (tmp_path / "log").open("ab") as log:
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "before printed new after\n"


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_permissions_are_kept_and_new_files_honor_the_umask(tmp_path, mode):
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch()
    old.chmod(mode)
    before = os.umask(0o027)
    try:
        with replaced_file(old) as file:
            [partial] = (path for path in tmp_path.iterdir() if path != old)
            assert stat.S_IMODE(partial.stat().st_mode) == mode, "nobody reads it meanwhile"
            file.write(b"new")
        replace_file(new, b"new")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [mode, 0o640]


def test_an_error_keeps_the_old_content(folder):
    before = kinds(folder)
    with pytest.raises(TypeError), replaced_file("link") as file:
        file.write(b"new" + "not bytes")  # type: ignore[operator]
    assert Path("file").read_text() == "old"
    assert kinds(folder) == before


UNWRITABLE_LATER: dict[str, tuple[object, ...]] = {
    "must be a path": ("", 5),
    "it is a folder; name a file": (".", "new/"),
    "there is no folder .*/missing": ("missing/new", "lost"),
}


@pytest.mark.parametrize(("path", "message"), rows(UNWRITABLE_LATER))
def test_files_that_cannot_be_written_are_known_before(folder, path, message):
    with pytest.raises(ConfigError, match=f"^out is {path!r}.*{message}"):
        check_file_to_write("out", path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "must be a path"),
        ("-", "name a folder"),
        ("file", "file is not a folder"),
        ("pipe", "pipe is not a folder"),
        ("file/new", "file is not a folder"),
    ],
)
def test_folders_that_cannot_be_written(folder, path, message):
    with pytest.raises(ConfigError, match=f"^out is {path!r}.*{message}"):
        folder_to_write("out", path)
