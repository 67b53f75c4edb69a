"""The copy of a run's files, from which the run goes on on another host."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_sharded.files.remote_files import RemotePath
from dlrm_sharded.runs.remote_copy import RemoteCopy
from tests.object_store import web_hdfs


@pytest.fixture
def home(tmp_path: Path) -> Iterator[RemotePath]:
    with web_hdfs(tmp_path / "store") as url:
        yield RemotePath(url) / "run"


def filled(folder: Path, **files: str) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_what_changes_is_copied_and_a_claim_is_not(home, tmp_path):
    folder = filled(tmp_path / "a", plan_json="{}", _hydra__config_yaml="a: 1", train_log="1")
    filled(folder, checkpoints__step__part="x")
    (folder / ".owner").write_text("me")
    copy = RemoteCopy(folder, home)
    copy.push()
    assert {*home.entries()} == {"plan.json", ".hydra", "train.log"}
    (home / "plan.json").delete()
    filled(folder, train_log="1, 2")
    copy.push()
    assert (home / "train.log").read_bytes() == b"1, 2"
    assert not (home / "plan.json").exists(), "it has not changed"


def test_another_host_gets_the_files(home, tmp_path):
    first = filled(tmp_path / "a", run_json="1 start", plan_json="{}", train_log="of a")
    RemoteCopy(first, home).push()
    other = filled(tmp_path / "b", train_log="of b")
    RemoteCopy(other, home).pull()
    assert {path.name: path.read_text() for path in other.iterdir()} == {
        "run.json": "1 start",
        "plan.json": "{}",
        "train.log": "of b",
    }


@pytest.mark.parametrize(
    ("run", "plan"), [("1 start", "mine"), ("0 starts", "theirs")], ids=["last", "earlier"]
)
def test_only_an_earlier_host_gets_them(run, plan, home, tmp_path):
    """The files of the host that had the last start are newer than their copies."""
    RemoteCopy(filled(tmp_path / "a", run_json="1 start", plan_json="theirs"), home).push()
    other = filled(tmp_path / "b", run_json=run, plan_json="mine")
    RemoteCopy(other, home).pull()
    assert (other / "plan.json").read_text() == plan


def test_a_run_that_begins_finds_nothing(home, tmp_path):
    RemoteCopy(tmp_path, home).pull()
