"""dlrm-compare: sharders on many tasks, in one command, or one message and an exit code."""

import dataclasses
import json
import time
from pathlib import Path

import polars as pl
import pytest

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.hardware.gpus.gpu_specs import gpu_specs
from dlrm_sharded.plans.plan import read_plan
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology, read_task, with_optimizer
from dlrm_sharded.ranks.process import start_ticks
from dlrm_sharded.testing import small_tasks
from tests import preloaded
from tests.unit.synthetic import tables_of

pytestmark = pytest.mark.slow

TASK = small_tasks()["w3-mixed"]
OWN = """
from dlrm_sharded.plans.plan import ShardingPlan

class LastRank:
    def __init__(self, rank=-1):
        self.rank = rank

    def shard(self, task):
        rank = self.rank % task.topology.world_size
        return ShardingPlan.from_ranks(task, [rank] * len(task.tables))
"""
WAITING = """
        import os, pathlib, time
        if not os.path.exists("pid"):
            pathlib.Path("pid").write_text(str(os.getpid()))
            time.sleep(600)
        rank ="""
HANG_S = 600.0


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
    return tmp_path


def test_compares_and_goes_on(tasks):
    words = ["sharders=[dim,random;seed=3]", "tasks=tasks", "out=out"]
    done = compare(tasks, *words)
    assert "comparison of 2 tasks:" in done.output
    assert "result: " in done.output.splitlines()[-1]
    assert sorted(path.name for path in (tasks / "out").iterdir() if path.name[0] != ".") == [
        *("by_plan.csv", "by_rank.csv", "cases.jsonl"),
        *("plans", "prices", "ratios.png", "summary.md"),
    ]
    found = pl.read_csv(tasks / "out" / "by_plan.csv")
    assert found["sharder"].to_list() == ["dim", "random;seed=3"] * 2
    assert found["prices"].n_unique() == 1
    ranks = pl.read_csv(tasks / "out" / "by_rank.csv")
    for row in found.iter_rows(named=True):
        plan = tasks / "out" / "plans" / row["task"] / f"{row['sharder']}.json"
        of_plan = (pl.col("task") == row["task"]) & (pl.col("sharder") == row["sharder"])
        assert len(read_plan(plan).shards) == row["num_shards"]
        total = ranks.filter(of_plan).select(pl.sum_horizontal([f"{s}_ms" for s in STAGES]))
        assert total.to_series().max() == pytest.approx(row["cost_ms"])
        made_from = json.loads(plan.read_text())["made_from"]
        assert made_from["prices_digest"] == row["prices"]
    before = (tasks / "out" / "by_plan.csv").read_bytes()
    assert "reusing 4 of 4 cases" in compare(tasks, *words).output
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
    assert "reusing 2 of 4 cases" in compare(tasks, *words).output
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
    assert "reusing 1 of 2 cases" in done.output
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
    assert ": prior, within about" in summary
    assert "## DLRM-20 (4)" in summary
    assert (tmp_path / "comparison" / "tasks" / "task_000.json").exists()


def test_8_against_64_ranks(tmp_path):
    """On 64 ranks the lookups are fewer per rank, and tables fit that do not fit on 8."""
    small = ShardingTask(tables_of(*[(10**6, 64, 20.0)] * 512), Topology(2, 2**40), 65_536)
    large = small.with_values(num_embeddings={table.name: 8 * 10**6 for table in small.tables})
    for name, task in (("small", small), ("large", large)):
        write_json(tmp_path / f"{name}.json", with_optimizer(task, "rowwise_adagrad").to_json())
    words = ["sharders=[dim]", "tasks=*.json", "topologies=[h100_80gb,a100_80gb]"]
    done = compare(tmp_path, *words, "ranks=[8,64]", "out=out")
    found = pl.read_csv(tmp_path / "out" / "by_plan.csv")
    names = ["topology", "world_size", "num_hosts"]
    sizes = [(name, *size) for name in ("h100_80gb", "a100_80gb") for size in ((8, 1), (64, 8))]
    assert found.select(names).rows() == 2 * sizes
    missing, cost_ms = found["missing_gib"].to_list(), found["cost_ms"].to_list()
    assert missing[0] * GIB == pytest.approx(512 * 8 * 10**6 * (4 * 64 + 4) - 8 * 56 * GIB)
    assert missing == [missing[0], 0, missing[0], 0, 0, 0, 0, 0]
    assert [ms is None for ms in cost_ms] == [True, False, True, False, *[False] * 4]
    assert cost_ms[5] < cost_ms[4] < cost_ms[6]  # on 8 ranks, an H100 takes less than an A100
    assert cost_ms[7] < cost_ms[6]
    assert f"  {missing[0]:,.4g}  " in done.output
    for text in (done.output, (tmp_path / "out" / "summary.md").read_text()):
        assert "NVIDIA H100 80GB HBM3: prior, within about 50 %" in text
        assert "NVIDIA A100-SXM4-80GB: prior, within about" in text
    task = read_task(tmp_path / "out" / "tasks" / "small-h100_80gb-64.json")
    assert (task.tables, task.batch_size) == (small.tables, small.batch_size)
    assert (task.topology.world_size, task.topology.ranks_per_host) == (64, 8)
    assert task.optimizer == "rowwise_adagrad"


def test_a_topology_of_ones_own(tmp_path):
    """The memory is a fraction of the data sheet's unless the topology states it."""
    write_json(tmp_path / "task.json", dataclasses.replace(TASK, batch_size=36).to_json())
    (tmp_path / "mine" / "topology").mkdir(parents=True)
    own = "defaults: [detect]\nhardware: v100_pcie\ngpus_per_host: 1\nreserved_gib: 2\n"
    (tmp_path / "mine" / "topology" / "own.yaml").write_text(own)
    words = ["--config-dir=mine", "sharders=[dim]", "tasks=task.json", "topologies=own"]
    compare(tmp_path, *words, "out=out")
    [file] = (tmp_path / "out" / "tasks").iterdir()
    topology = read_task(file).topology
    assert (topology.world_size, topology.ranks_per_host) == (TASK.topology.world_size, 1)
    memory_gib = gpu_specs()["v100_pcie"].memory_gib
    assert memory_gib is not None
    assert topology.memory_bytes == int((0.7 * memory_gib - 2) * GIB)


def test_tasks_of_many_folders(tmp_path):
    for path in (tmp_path / "x", tmp_path / "y"):
        path.mkdir()
        write_json(path / "task.json", TASK.to_json())
    compare(tmp_path, "sharders=[dim]", "tasks=*/*.json", "out=out")
    names = ["x-task", "y-task"]
    assert sorted(path.name for path in (tmp_path / "out" / "plans").iterdir()) == names
