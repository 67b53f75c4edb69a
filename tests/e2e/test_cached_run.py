"""A run with caches in its lookups that is interrupted trains what one without them does."""

from pathlib import Path

import torch

from dlrm_sharded.checkpoint.folder import checkpoints
from dlrm_sharded.checkpoint.manifest import read_manifest
from dlrm_sharded.checkpoint.restore import load_whole
from dlrm_sharded.checkpoint.storage import is_weight
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.layouts import ColumnShards
from dlrm_sharded.plans.plan import ShardingPlan, read_plan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE
from dlrm_sharded.plans.task import read_task
from tests import preloaded
from tests.conftest import SMALL_RUN
from tests.e2e.runs import environment, result_of, train_alone

SETTINGS = (*SMALL_RUN, "trainer.checkpoint.every_steps=5")
FIRST = ("sharder=dim", "trainer.num_steps=7")


def train_cached(folder: Path, *overrides: str) -> None:
    run = ["-m", "tests.cached_lookups", f"hydra.run.dir={folder}", *SETTINGS, *overrides]
    preloaded.run(*run, env=environment(), exit_code=0)


def check_alike(folder: Path, other: Path) -> None:
    expected, found = (read_manifest(checkpoints(run)[0]) for run in (folder, other))
    assert expected.state.step == found.state.step == 12
    for name in filter(is_weight, expected.tensors):
        assert torch.equal(load_whole(found, name), load_whole(expected, name)), name
    for key in ("auroc", "loss"):
        assert result_of(other)[key] == result_of(folder)[key]


def test_measured_saved_resumed_and_evaluated(tmp_path):
    whole, cached = tmp_path / "whole", tmp_path / "cached"
    train_alone(whole, *SETTINGS, "sharder=dim")
    train_cached(cached, *FIRST)
    train_cached(cached, "sharder=dim", "resume=auto")
    check_alike(whole, cached)


def test_resumed_under_another_plan(tmp_path):
    """Every table is in one piece first, and then, if it is wide enough, in two."""
    plain, cached = tmp_path / "plain", tmp_path / "cached"
    train_alone(plain, *SETTINGS, *FIRST)
    train_cached(cached, *FIRST)
    tables = read_task(plain / "task.json").tables
    shards = [
        shard
        for table in tables
        for shard in ColumnShards.shards(
            table, [(0, max(table.embedding_dim // 2, COLUMN_MULTIPLE))] * 2
        )
        if shard.num_cols
    ]
    split = ShardingPlan(1, tuple(shards))
    write_json(tmp_path / "split.json", split.to_json())
    later = ("sharder=plan_file", f"sharder.path={tmp_path / 'split.json'}", "resume=auto")
    train_alone(plain, *SETTINGS, *later)
    train_cached(cached, *later)
    assert read_plan(cached / "plan.json").shards == split.shards
    assert len(tables) < len(shards)
    check_alike(plain, cached)
