"""scripts/plan.py: a plan, or one message and an exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_sharded.plan import read_plan, validate, write_json
from dlrm_sharded.task import read_task
from dlrm_sharded.testing import small_tasks

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "plan.py"


def plan(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def task_json(tmp_path: Path) -> Path:
    write_json(tmp_path / "task.json", small_tasks()["w3-mixed"].to_json())
    return tmp_path / "task.json"


@pytest.mark.parametrize("sharder", ["size_lookup", "torchrec"])
def test_writes_a_plan(task_json: Path, sharder: str) -> None:
    done = plan(task_json.parent, "task=task.json", f"sharder={sharder}", "out=p.json")
    assert done.returncode == 0, done.stderr
    validate(read_plan(task_json.parent / "p.json"), read_task(task_json))
    assert json.loads((task_json.parent / "p.json").read_text())["lower_bound_ms"] is None
    assert sorted(p.name for p in task_json.parent.iterdir()) == ["p.json", "task.json"]


def test_own_sharder(task_json: Path) -> None:
    """Another class through _target_ alone; the chosen yaml's arguments are not its own."""
    target = "sharder._target_=dlrm_sharded.sharders.heuristics.RandomSharder"
    done = plan(task_json.parent, "task=task.json", target, "out=p.json")
    assert done.returncode == 0, done.stderr
    assert read_plan(task_json.parent / "p.json").sharder == "random"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=task.json", "sharder=nope"], "size_lookup"),
        (["task=task.json", "sharder.seeed=1"], "seeed"),
        (["task=none.json"], "cannot read the task file none.json"),
        ([], "task"),
        (["task=huge.json"], "'t5' needs 256,000,000 B, more than the 10,000,000 B"),
        (["task=empty.json"], "no tables"),
        (["task=task.json", "sharder=plan_file", "sharder.path=huge.json"], "lacks the key"),
        (["task=task.json", "sharder._target_=my.own.Sharder"], "my.own.Sharder"),
    ],
    ids=["sharder", "key", "file", "no_task", "huge", "no_tables", "no_plan", "target"],
)
def test_says_what_is_wrong(task_json: Path, overrides: list[str], message: str) -> None:
    folder = task_json.parent
    write_json(folder / "huge.json", small_tasks()["w2-huge_table"].to_json())
    write_json(folder / "empty.json", small_tasks()["w3-mixed"].to_json() | {"tables": []})
    before = sorted(folder.iterdir())

    done = plan(folder, *overrides)

    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1
    assert sorted(folder.iterdir()) == before
