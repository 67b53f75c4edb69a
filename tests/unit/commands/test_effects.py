"""Overrides that cannot have an effect are refused with the reason, in all commands that plan."""

import pytest
import torch
from omegaconf import DictConfig

from dlrm_sharded.commands import plan
from dlrm_sharded.commands.asked_task import asked_task
from dlrm_sharded.commands.hydra_app import check_overrides
from dlrm_sharded.commands.train import job_settings
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.commands.conftest import Compose

FILE = "task=task.json"
DATA = "data=synthetic"
TASK = ShardingTask((Table("a", 1000, 16, 1.0),), Topology(2, 10**9, compute_device="cpu"), 64)


@pytest.fixture(autouse=True)
def in_a_folder_with_a_task(composed: Compose) -> None:
    write_json("task.json", TASK.to_json())


def check(config: str, cfg: DictConfig) -> None:
    """Read the config as its command does."""
    if config == "plan":
        check_overrides(plan.unused(cfg))
        asked_task(cfg)
    else:
        job_settings(cfg, Rank(0, 1, 0, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    ("config", "source", "override"),
    [
        *(
            ("plan", FILE, override)
            for override in (
                *("topology.world_size=-5", "topology.memory_gib=abc", "topology.reserved_gib=55"),
                *("topology.compute_device=cpu", "topology.memory_fraction=1"),
                *("topology=h100_80gb", "batch_size=-3"),
                *("optimizer.clip_norm=1", "task_out=/x/y", "optimizer.dense=sgd"),
            )
        ),
        ("plan", DATA, "topology=h100_80gb topology.hardware=a100"),
        ("train", DATA, "topology=h100_80gb topology.gpus_per_host=4"),
        ("plan", FILE, "journal=/nonexist"),
        ("plan", FILE, "sharder=torchrec seed=3"),
        ("plan", FILE, "again=plan.json sharder=dim"),
        ("plan", FILE, "hardware=here cost_model=none journal=/nonexist"),
        ("plan", DATA, "hardware=h100_sxm journal=x"),
        ("plan", DATA, "topology.memory_gib=9 topology.memory_fraction=0.5"),
        ("train", DATA, "topology=h100_80gb topology.memory_fraction=0.5"),
    ],
    ids=str,
)
def test_an_override_without_an_effect(composed, config, source, override):
    cfg = composed(config, source, *override.split())
    unused = override.split()[-1]
    with pytest.raises(ConfigError, match=rf"^{unused} has no effect: .{{20}}") as raised:
        check(config, cfg)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("plan", [FILE, "optimizer=sgd", "explain=true", "seed=1", "topology.memory_gib=null"]),
        ("plan", [FILE, "hardware=here", "journal=x"]),
        ("plan", [FILE, "journal=none"]),
        ("plan", [DATA, "sharder=torchrec", "seed=3", "topology.memory_gib=1"]),
        ("plan", [FILE, "sharder=torchrec", "seed=3", "hydra.mode=MULTIRUN"]),
        ("plan", [DATA, "task_out=x", "topology=h100_80gb", "batch_size=64"]),
    ],
    ids=str,
)
def test_an_override_with_an_effect(composed, config, overrides):
    check(config, composed(config, *overrides))


@pytest.mark.parametrize("override", ["sharder=[random,dim]", "optimizer=[sgd,adam]"])
def test_one_option_of_a_group_is_used(composed, override):
    with pytest.raises(ConfigError, match="is a list, but this command takes one"):
        check("plan", composed("plan", FILE, override))


def test_a_batch_that_ranks_cannot_share(composed):
    write_json("task.json", ShardingTask(TASK.tables, TASK.topology, 7).to_json())
    with pytest.raises(ConfigError, match=r"^batch_size in task.json is 7; it is global and must"):
        asked_task(composed("plan", FILE))


@pytest.mark.parametrize("key", ["explain", "dry_run", "check_memory"])
def test_a_flag_of_a_run_is_true_or_false(composed, key):
    with pytest.raises(ConfigError, match=f"^{key} is 'maybe'; it must be true or false"):
        job_settings(composed("train", DATA, f"{key}=maybe"), Rank(0, 1, 0, 1, torch.device("cpu")))
