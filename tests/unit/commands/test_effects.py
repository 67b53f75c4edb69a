"""Overrides that cannot have an effect are refused with the reason, in all commands that plan."""

import re

import pytest
import torch

from dlrm_sharded.commands.advise_config import question_of, stated_task
from dlrm_sharded.commands.simulate import _settings
from dlrm_sharded.commands.simulated_cluster import build_cluster
from dlrm_sharded.commands.task import asked_task, check_effects, check_question
from dlrm_sharded.commands.train import job_settings
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.files.json_files import write_json
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology, with_optimizer
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.commands.conftest import Compose

FILE = "task=task.json"
DATA = "data=synthetic"
TASK = ShardingTask((Table("a", 1000, 16, 1.0),), Topology(2, 10**9, compute_device="cpu"), 64)


@pytest.fixture(autouse=True)
def in_a_folder_with_a_task(composed: Compose) -> None:
    write_json("task.json", TASK.to_json())


@pytest.mark.parametrize(
    ("config", "source", "override"),
    [
        *(
            (config, FILE, override)
            for config in ("plan", "simulate")
            for override in (
                *("topology.world_size=-5", "topology.memory_gib=abc", "topology.reserved_gib=55"),
                *("topology.compute_device=cpu", "topology.memory_fraction=1"),
                *(
                    "topology=h100_80gb",
                    "batch_size=-3",
                    "curve_batches=foo",
                    "optimizer.clip_norm=1",
                ),
            )
        ),
        *(("plan", FILE, override) for override in ("task_out=/x/y", "optimizer.dense=sgd")),
        ("plan", FILE, "journal=/nonexist"),
        ("plan", FILE, "sharder=torchrec seed=3"),
        ("plan", FILE, "hardware=here cost_model=none journal=/nonexist"),
        ("plan", DATA, "hardware=h100_sxm journal=x"),
        ("plan", DATA, "topology.memory_gib=9 topology.memory_fraction=0.5"),
        ("simulate", DATA, "topology=h100_80gb topology.memory_fraction=0.5"),
        ("simulate", DATA, "trainer.num_steps=5"),
        *(
            ("simulate", DATA, f"hardware=h100_sxm {override}")
            for override in (
                *("measure.iterations=3", "measured_ranks=all", "minutes=3", "neighbors=1"),
                *("table_gib=1", "journal=x"),
            )
        ),
        ("simulate", DATA, "measured_ranks=all minutes=3"),
        *(
            ("advise", FILE, override)
            for override in (
                *("cost_model=none", "cost_model.artifact=x", "journal=x"),
                *("topology.world_size=3", "topology.compute_device=cpu"),
            )
        ),
        ("advise", DATA, "num_dense=4"),
        ("train", DATA, "topology=h100_80gb topology.memory_fraction=0.5"),
    ],
    ids=str,
)
def test_an_override_without_an_effect(composed, config, source, override):
    cfg = composed(config, source, *override.split())
    unused = override.split()[-1]
    with pytest.raises(ConfigError, match=rf"^{unused} has no effect: .{{20}}") as raised:
        check_effects(cfg)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("plan", [FILE, "optimizer=sgd", "explain=true", "seed=1", "topology.memory_gib=null"]),
        ("plan", [FILE, "hardware=here", "journal=x"]),
        ("plan", [FILE, "journal=none"]),
        ("plan", [DATA, "sharder=torchrec", "seed=3"]),
        ("plan", [FILE, "sharder=torchrec", "seed=3", "hydra.mode=MULTIRUN"]),
        ("plan", [DATA, "task_out=x", "topology=h100_80gb", "batch_size=64"]),
        ("simulate", [DATA, "topology.memory_fraction=0.5", "measure.iterations=3", "minutes=1"]),
        ("simulate", ["experiment=mlperf_dcnv2", "hardware=h100_sxm", "spread=0"]),
        ("advise", [FILE, "hardware=[h100,cpu]", "cost_model.artifact=x", "sharder=[dim,size]"]),
        ("advise", [FILE, "num_dense=4", "batch_size=64", "topology.ranks_per_host=2"]),
    ],
    ids=str,
)
def test_an_override_with_an_effect(composed, config, overrides):
    check_question(composed(config, *overrides), "plan from")


@pytest.mark.parametrize("override", ["sharder=[random,dim]", "optimizer=[sgd,adam]"])
def test_one_option_of_a_group_is_used(composed, override):
    with pytest.raises(ConfigError, match="is a list, and one"):
        asked_task(composed("plan", FILE, override), "plan from")


def test_a_batch_that_ranks_cannot_share(composed):
    write_json("task.json", ShardingTask(TASK.tables, TASK.topology, 7).to_json())
    with pytest.raises(ConfigError, match=r"^batch_size in task.json is 7; it is global and must"):
        asked_task(composed("plan", FILE), "plan from")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sharder=[dim,dim]", "sharder names 'dim' twice"),
        ("exchange_precision=foo", "exchange_precision is 'foo'; known"),
        ("hardware=cpu cost_model=none", "cost_model is none; advice needs prices"),
        ("hardware=5", "hardware is [5], must be a name or a list"),
        ("hardware=[[h100]]", "hardware is "),
        ("least_gain=0.1", "least_gain=0.1 has no effect: ranks= has one number"),
    ],
)
def test_advice_is_refused_before_its_first_case(composed, override, message):
    cfg = composed("advise", FILE, "ranks=1", *override.split())
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        question_of(cfg, stated_task(cfg))


@pytest.mark.parametrize("key", ["explain", "dry_run", "check_memory"])
def test_a_flag_of_a_run_is_true_or_false(composed, key):
    with pytest.raises(ConfigError, match=f"^{key} is 'maybe', must be true or false"):
        job_settings(composed("train", DATA, f"{key}=maybe"), Rank(0, 1, 0, 1, torch.device("cpu")))


def test_the_dense_part_of_the_files_optimizer_is_simulated(composed):
    """The config has Adagrad, unless told otherwise."""
    write_json("task.json", with_optimizer(TASK, "sgd").to_json())
    cfg = composed("simulate", FILE, "out=out")
    cluster = build_cluster(cfg)
    assert cluster.dense.optimizer.dense == "sgd"
    found = _settings(cfg, cluster)["optimizer"]
    assert (found["embedding"], found["dense"]) == ("sgd", "sgd")
