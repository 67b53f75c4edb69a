"""dlrm-train-policy: a policy, or one message and an exit code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.files.provenance import device_name
from dlrm_sharded.hardware.artifact import ARTIFACT_SUFFIX, HEADER
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.rl.learned_policy import METHODS, load_policy
from dlrm_sharded.sharders.heuristics import WEIGHTS
from tests import preloaded
from tests.e2e.runs import environment, events_of
from tests.unit.rl.cases import yaml_pool

pytestmark = pytest.mark.slow

COMMAND = ("-m", "dlrm_sharded.commands.train_policy", "out=made", "log_dir=logs")
SMALL = [
    *("schedule.num_rounds=3", "schedule.plans_per_round=3", "num_validation_tasks=2"),
    *("tasks.num_tables=6", "tasks.world_size=2", "policy.cost_updates=3", "policy.cost_batch=4"),
]
QUICK = {
    "autoshard": ["policy.rollouts=2", "policy.tasks_per_rollout=2"],
    "dreamshard": ["policy.policy_updates=2", "policy.tasks_per_update=2"],
}
TAGS = {
    *("policy/cost_ms", "policy/best_heuristic_ms", "policy/measured_ms", "policy/estimated_ms"),
    *("policy/entropy", "policy/cost_error_percent"),
}


def train_policy(folder: Path, *overrides: str, exit_code: int = 0) -> preloaded.Ended:
    folder.mkdir(exist_ok=True)
    return preloaded.run(*COMMAND, *overrides, cwd=folder, env=environment(), exit_code=exit_code)


def artifact_of(folder: Path) -> Path:
    """Return the only file in the folder."""
    (path,) = (folder / "made").iterdir()
    assert path.suffix == ARTIFACT_SUFFIX
    return path


def header(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="numpy") as file:
        return json.loads(file.metadata()[HEADER])


def curves_of(folder: Path) -> dict[str, list[int]]:
    """Steps of each curve."""
    events = events_of(folder / "logs")
    tags = events.Tags()["scalars"]
    return {tag: [event.step for event in events.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("kind", METHODS)
def test_writes_a_policy(kind, tmp_path):
    quick = [*SMALL, *QUICK[kind], "costs=predicted", "seed=3"]
    done = train_policy(tmp_path, f"policy={kind}", *quick)
    shown = done.output
    assert "3/3" in shown
    assert "best heuristic" in shown
    assert shown.count("extrapolates") <= 1  # not once for every plan
    path = artifact_of(tmp_path)
    assert str(path.relative_to(tmp_path)) in shown
    written = header(path)
    hardware = device_name(torch.device("cpu"))
    assert (written["kind"], written["hardware"]) == (kind, hardware)
    assert written["fingerprint"]["cpu"]["threads"] == 1
    assert written["probe"]["gather_gb_per_s"] > 0
    assert written["training"]["costs"] == "predicted"
    assert written["training"]["schedule"]["seed"] == 3
    assert written["scores_ms"].keys() == {kind, *WEIGHTS}
    assert min(written["scores_ms"].values()) > 0

    policy = load_policy(kind, str(path), RunContext("cpu", optimizer="rowwise_adagrad"))
    pool = yaml_pool(part="unseen", num_tables=9, world_size=3)
    task = pool.task(pool.draw(np.random.default_rng(0)))
    ranks = policy.place(task, num_samples=2, seed=0)
    assert {*ranks} <= {0, 1, 2}
    curves = curves_of(tmp_path)
    assert curves.keys() == TAGS
    assert all(steps == [1, 2, 3] for steps in curves.values())


def test_retunes_the_packaged_policy(tmp_path):
    quick = [*SMALL, *QUICK["dreamshard"], "costs=predicted", "init_from=packaged"]
    done = train_policy(tmp_path, "policy=dreamshard", *quick)
    written = header(artifact_of(tmp_path))
    assert written["training"]["init_from"] == "packaged"
    before, after = written["initial_ms"], written["scores_ms"]["dreamshard"]
    shown = " ".join(done.output.split())
    assert f"plans cost {after:.2f} ms (before the training {before:.2f} ms), of the best" in shown


def test_measures_plans(tmp_path):
    """On this machine, of small tables."""
    tables = tuple(Table(f"t{i}", 500 * (i + 1), 8, 2.0) for i in range(4))
    write_json(tmp_path / "task.json", ShardingTask(tables, Topology(2, 10**6), 256).to_json())
    train_policy(
        tmp_path,
        *("policy=autoshard", *SMALL, *QUICK["autoshard"], "tasks.num_tables=4"),
        *("costs=measured", "tasks.tables=[task.json]", "tasks.batch_sizes=[256,512]"),
        *("schedule.num_rounds=1", "schedule.plans_per_round=1"),
        *("measure.iterations=2", "measure.warmup=1", "measure.time_budget_s=0.1"),
    )
    written = header(artifact_of(tmp_path))
    assert written["training"]["costs"] == "measured"
    assert curves_of(tmp_path).keys() == TAGS
