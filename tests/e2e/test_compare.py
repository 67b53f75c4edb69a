"""dlrm-compare: sharders on many tasks, in one command, or one message and an exit code."""

import dataclasses
import json
import time
from pathlib import Path

import polars as pl
import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.plan import read_plan
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.ranks.process import start_ticks
from dlrm_sharded.testing import small_tasks
from tests import preloaded

pytestmark = pytest.mark.slow

TASK = small_tasks()["w3-mixed"]
OWN = """
from dlrm_sharded.plans.plan import whole_tables

class LastRank:
    def __init__(self, rank=-1):
        self.rank = rank

    def shard(self, task):
        rank = self.rank % task.topology.world_size
        return whole_tables(task, [rank] * len(task.tables))
"""
WAITING = """
        import os, pathlib, time
        if not os.path.exists("pid"):
            pathlib.Path("pid").write_text(str(os.getpid()))
            time.sleep(600)
        rank ="""
HANG_S = 60.0


def compare(folder: Path, *words: str, exit_code: int = 0) -> preloaded.Ended:
    module = ("-m", "dlrm_sharded.commands.compare")
    return preloaded.run(*module, *words, cwd=folder, exit_code=exit_code)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks of different batches, in a folder."""
    for number, batch_size in enumerate((TASK.batch_size, 2 * TASK.batch_size)):
        task = dataclasses.replace(TASK, batch_size=batch_size)
        (tmp_path / "tasks").mkdir(exist_ok=True)
        write_json(tmp_path / "tasks" / f"task_{number}.json", task.to_json())
    write_json(tmp_path / "tasks" / "tasks.json", {})  # version 0.2 wrote it beside tasks
    return tmp_path


def test_compares_and_goes_on(tasks):
    words = ["sharders=[dim,random;seed=3]", "tasks=tasks", "out=out"]
    done = compare(tasks, *words)
    assert "comparison of 2 tasks:" in done.output
    assert "result: " in done.output.splitlines()[-1]
    assert sorted(path.name for path in (tasks / "out").iterdir() if path.name[0] != ".") == [
        *("by_plan.csv", "by_rank.csv", "by_shard.csv", "by_task.csv", "cases.jsonl"),
        *("plans", "prices", "ratios.png", "summary.md"),
    ]
    found = pl.read_csv(tasks / "out" / "by_plan.csv")
    assert found["sharder"].to_list() == ["dim", "random;seed=3"] * 2
    assert found["prices"].n_unique() == 1
    shards = pl.read_csv(tasks / "out" / "by_shard.csv")
    ranks = pl.read_csv(tasks / "out" / "by_rank.csv")
    for row in found.iter_rows(named=True):
        plan = tasks / "out" / "plans" / row["task"] / f"{row['sharder']}.json"
        of_plan = (pl.col("task") == row["task"]) & (pl.col("sharder") == row["sharder"])
        assert shards.filter(of_plan).height == len(read_plan(plan).shards) == row["num_shards"]
        total = ranks.filter(of_plan).select(pl.sum_horizontal([f"{s}_ms" for s in STAGES]))
        assert total.to_series().max() == pytest.approx(row["cost_ms"])
        made_from = json.loads(plan.read_text())["made_from"]
        assert made_from["prices_digest"] == row["prices"]
    before = (tasks / "out" / "by_plan.csv").read_bytes()
    assert "4 of 4 cases are taken over" in compare(tasks, *words).output
    assert (tasks / "out" / "by_plan.csv").read_bytes() == before


def test_a_sharder_of_ones_own(tasks):
    """A yaml in a folder of one's own, and a class beside it; a changed class is planned again."""
    (tasks / "mine" / "sharder").mkdir(parents=True)
    (tasks / "mine" / "sharder" / "last.yaml").write_text("_target_: mine_sharder.LastRank\n")
    (tasks / "mine_sharder.py").write_text(OWN)
    words = ["--config-dir=mine", "sharders=[dim,last]", "tasks=tasks", "out=out", "format=parquet"]
    compare(tasks, *words)
    found = pl.read_parquet(tasks / "out" / "by_plan.parquet").filter(pl.col("sharder") == "last")
    assert set(found["slowest_rank"]) == {2}
    (tasks / "mine_sharder.py").write_text(OWN.replace("rank=-1", "rank=1"))
    assert "2 of 4 cases are taken over" in compare(tasks, *words).output
    found = pl.read_parquet(tasks / "out" / "by_plan.parquet").filter(pl.col("sharder") == "last")
    assert set(found["slowest_rank"]) == {1}


def test_a_killed_command_goes_on(tasks):
    """Its forks end with it: none goes on to hold a core, or the folder's lock."""
    (tasks / "mine" / "sharder").mkdir(parents=True)
    (tasks / "mine" / "sharder" / "last.yaml").write_text("_target_: mine_sharder.LastRank\n")
    (tasks / "mine_sharder.py").write_text(OWN.replace("        rank =", WAITING, 1))
    words = ["--config-dir=mine", "sharders=[dim,last]", "tasks=tasks/task_0.json", "out=out"]
    kept = tasks / "out" / "cases.jsonl"
    module = ("-m", "dlrm_sharded.commands.compare")
    with preloaded.start(*module, *words, cwd=tasks, own_process=True) as process:
        while not (kept.exists() and (tasks / "pid").exists()):
            time.sleep(0.05)
            assert process.poll() is None
        process.kill()
    pid, deadline = int((tasks / "pid").read_text()), time.monotonic() + HANG_S
    while start_ticks(pid) is not None:
        time.sleep(0.05)
        assert time.monotonic() < deadline
    done = compare(tasks, *words)
    assert "1 of 2 cases are taken over" in done.output
    assert pl.read_csv(tasks / "out" / "by_plan.csv")["cost_ms"].null_count() == 0


def test_measures_in_rounds(tasks):
    words = ["sharders=[dim,size]", "tasks=tasks/task_0.json", "out=out", "measured=true"]
    done = compare(tasks, *words, "rounds=2", "iterations=1")
    assert "measured / dim" in done.output
    row = pl.read_csv(tasks / "out" / "by_plan.csv").row(0, named=True)
    assert row["measured_ms"] > 0
    assert "measured_fwd_compute_ms" in pl.read_csv(tasks / "out" / "by_rank.csv").columns
    before = (tasks / "out" / "measurements.jsonl").read_bytes()
    compare(tasks, *words, "rounds=2", "iterations=1")
    assert (tasks / "out" / "measurements.jsonl").read_bytes() == before


def test_a_preset(tmp_path):
    compare(
        tmp_path, "preset=dreamshard_table_1", "num=2", "sharders=[dim,random]", "reference=dim"
    )
    summary = (tmp_path / "comparison" / "summary.md").read_text()
    assert "Prices: prior" in summary
    assert "## DLRM-20 (4)" in summary
    assert (tmp_path / "comparison" / "tasks" / "task_000.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tasks=none"], "tasks is 'none', and no task is there"),
        (["tasks=*/tasks.json"], "no task is there"),
        (["tasks=bad/*.json"], "bad/task_0.json"),
        ([], "name tasks=, a folder or a pattern"),
        (["tasks=tasks", "task_set=paper"], "and not both"),
        (["task_set=papers"], "task_set is 'papers'; known: paper"),
        (["tasks=tasks", "num=3"], "num=3 has no effect"),
        (["tasks=tasks", "sharders=[dims]"], "dims"),
        (["tasks=tasks", "sharders=[dim,dim]"], "names 'dim' twice"),
        (["tasks=tasks", "sharders=[dim;weights=1]"], "weights"),
        (["tasks=tasks", "reference=size"], "reference is 'size', must be one of dim"),
        (["tasks=tasks", "out=tasks/task_0.json"], "is not a folder"),
        (["tasks=tasks", "format=xlsx"], "must be csv or parquet"),
        (["tasks=tasks", "cost_model=none"], "cost_model is none"),
        (["tasks=tasks", "hardware=h100"], "the task is for CPUs"),
        (["task_set=dreamshard_table_1", "num=1", "measured=true"], "leave measured out"),
        (["tasks=tasks", "limit_s=0"], "limit_s is 0"),
        (["tasks=tasks", "rounds=9"], "rounds=9 has no effect: measured=true"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_refuses(words, message, tasks):
    """One message, before anything is written."""
    (tasks / "bad").mkdir()
    (tasks / "bad" / "task_0.json").write_text('{"tables": [}')
    if not any(word.startswith("sharders") for word in words):
        words = ["sharders=[dim]", *words]
    done = compare(tasks, *words, exit_code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tasks / "comparison").exists()


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/task.json", "y/task.json"], ["x-task", "y-task"]),
        (["x/a.json", "y/b.json"], ["a", "b"]),
    ],
    ids=["same_names", "other_names"],
)
def test_tasks_of_many_folders(tmp_path, paths, names):
    for path in paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        write_json(tmp_path / path, TASK.to_json())
    compare(tmp_path, "sharders=[dim]", "tasks=*/*.json", "out=out")
    assert sorted(path.name for path in (tmp_path / "out" / "plans").iterdir()) == names
