"""Remote files, on a server of which every tenth request fails, and on one that always fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_sharded.files import remote_files
from dlrm_sharded.files.errors import ConfigError, RemoteFileError
from dlrm_sharded.files.remote_files import (
    PASSWORD,
    RemotePath,
    local_file,
    location,
    seen_in_time,
    sizes_of,
)
from tests.object_store import store, web_hdfs


@pytest.fixture(params=["webhdfs", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemotePath]:
    with store(request.param, tmp_path) as url:
        yield RemotePath(url) / "a run"


def test_files_come_back_as_they_went(folder):
    """Each of these is more than ten requests."""
    for number in range(12):
        (folder / "deep" / str(number)).write_bytes(bytes([number]) * number)
    assert (folder / "deep").entries() == {str(number): number for number in range(12)}
    for number in range(12):
        assert (folder / "deep" / str(number)).read_bytes() == bytes([number]) * number
    assert sizes_of(folder / "deep", ["3", "11", "12"]) == {"3": 3, "11": 11}
    (folder / "copy").write_bytes(b"abc")
    assert folder.entries() == {"deep": None, "copy": 3}
    with local_file(folder / "copy") as copy:
        assert (copy.read_bytes(), copy.name) == (b"abc", "copy")
    assert not copy.exists()


def test_what_is_there_and_what_is_not(folder):
    (folder / "file").write_bytes(b"")
    assert (folder / "file").is_file()
    assert folder.exists()
    assert not folder.is_file()
    gone = folder / "gone"
    assert not gone.exists()
    assert not gone.is_file()
    assert list(gone.iterdir()) == []
    gone.delete()
    with pytest.raises(FileNotFoundError) as raised:
        gone.read_bytes()
    assert raised.value.strerror == "No such file or directory"


def test_renamed_and_deleted_with_all_that_is_in_it(folder):
    (folder / "old" / "file").write_bytes(b"abc")
    (folder / "old").rename(str(folder / "new"))
    assert folder.entries() == {"new": None}
    assert (folder / "new" / "file").read_bytes() == b"abc"
    (folder / "new").delete()
    assert folder.entries() == {}


def test_a_store_that_refuses_everything_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_files, "PAUSES_S", (0.0, 0.0))
    with (
        web_hdfs(tmp_path, every=1) as url,
        pytest.raises(RemoteFileError, match=r"^webhdfs://.*/run: HTTPError: 503 .*"),
    ):
        (RemotePath(url) / "run").write_bytes(b"abc")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nothing://bucket", "cannot be opened: Protocol not known: nothing"),
        (7, "must be a path"),
        ("", "must be a path"),
        ("file://", "which names no folder"),
        ("s3:///", "which names no folder"),
    ],
)
def test_refused_locations(value, said):
    with pytest.raises(ConfigError, match=rf"^key is .*{said}"):
        location("key", value)


@pytest.mark.parametrize("url", ["s3://me:secret@host/run", "webhdfs://me:secret@host:1/run"])
def test_a_password_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match=r"^key has a password") as raised:
        location("key", url)
    assert "secret" not in str(raised.value)


def test_a_path_is_one_of_a_disk():
    assert location("key", "runs/mine") == Path("runs/mine")
    assert location("key", "memory://mine") == RemotePath("memory://mine")
    with_account = "abfs://container@account.dfs.core.windows.net/a:b"
    assert not PASSWORD.search(with_account)


def test_what_is_seen_late_is_seen(monkeypatch):
    monkeypatch.setattr(remote_files, "LOOK_S", 0.0)
    looks = iter([False, False, True])
    assert seen_in_time(lambda: next(looks))
    monkeypatch.setattr(remote_files, "LATE_S", 0.0)
    assert not seen_in_time(lambda: False)
