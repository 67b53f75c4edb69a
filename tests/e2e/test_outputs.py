"""Commands write to standard output where asked, and refuse outputs that are no files."""

import json
import os
from pathlib import Path

import pytest

from tests import preloaded
from tests.e2e.runs import script

pytestmark = pytest.mark.slow

DATA = (
    *("data=synthetic", "data.max_rows=1000", "batch_size=64", "topology.world_size=2"),
    *("topology.memory_gib=1", "topology.compute_device=cpu"),
)


@pytest.fixture
def folder(task_json: Path) -> Path:
    os.mkfifo(task_json.with_name("pipe"))
    return task_json.parent


@pytest.mark.parametrize("source", [("task=task.json",), DATA], ids=["task", "data"])
def test_a_plan_on_standard_output_is_json(folder, source):
    before = sorted(folder.iterdir())
    done = script("plan", folder, *source, "sharder=dim", "out=-")
    assert json.loads(done.stdout)["sharder"] == "dim"
    assert "shards of" in done.stderr
    assert ("the task is not written" in done.stderr) == (source == DATA)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("plan", *DATA, "out=task.json"), "would both be 'task.json'; set task_out"),
        (("plan", *DATA, "task_out=x/y.json"), "task_out is 'x/y.json', but there is no folder"),
        (("compare", "tasks=task.json", "out=-"), "out is '-', standard output"),
        (("calibrate", "out=-"), "out is '-', standard output"),
        (("train_policy", "out=-"), "out is '-', standard output"),
        (("export", ".", "out=-"), "out is '-', standard output"),
    ],
    ids=lambda value: "-".join(value[:1] + value[-1:]) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_written_is_refused(folder, command, message):
    before = {path: path.lstat().st_ino for path in folder.iterdir()}
    module = f"dlrm_sharded.commands.{command[0]}"
    done = preloaded.run("-m", module, *command[1:], cwd=folder, exit_code=2)
    [error] = (line for line in done.stderr.splitlines() if "error: " in line)
    assert message in error
    assert {path: path.lstat().st_ino for path in folder.iterdir()} == before
