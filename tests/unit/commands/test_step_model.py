"""Commands know of steps when they plan, for `sharder.objective=step`."""

import pytest
import torch

from dlrm_sharded.commands.sharders import build_planner
from dlrm_sharded.commands.task import check_effects
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.plans.plan_report import plan_json
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.sharders.planning import Planner
from dlrm_sharded.sharders.search import SearchSharder
from tests.unit.commands.conftest import Compose, composed_config

TABLES = tuple(Table(f"t{i}", 20_000 * (i + 1), 64, 4.0 + 3 * i) for i in range(6))
H100 = RunContext("cuda", Hardware("NVIDIA H100 80GB HBM3"))
BY_STEP = ("task=unused", "sharder.objective=step", "sharder.patience=1")


def planner_of(context: RunContext, *overrides: str, config: str = "plan") -> Planner:
    named = BY_STEP if config == "plan" else BY_STEP[:1]
    return build_planner(composed_config(config, *named, *overrides), context)


def task_on(device: str) -> ShardingTask:
    return ShardingTask(TABLES, Topology(2, 8 * GIB, compute_device=device), 4096)


def test_a_cpu_needs_no_model() -> None:
    """The step is serial, so that a dense part would add to it and change no choice."""
    plan, report = planner_of(RunContext()).plan(task_on("cpu"))
    assert plan_json(plan, report)["made_from"]["sharder"]["objective"] == "step"
    sharder = planner_of(RunContext()).sharder
    assert isinstance(sharder, SearchSharder)
    assert sharder.context.step_model is not None
    cluster = sharder.context.step_model(sharder.context.pricing_for("it")(task_on("cpu")))
    assert not cluster.overlap.exchanges


def test_a_gpu_needs_its_name_and_a_model() -> None:
    with pytest.raises(ConfigError, match="needs the data sheet of the GPU; name one with hardwa"):
        planner_of(RunContext("cuda"), "model=dlrm").plan(task_on("cuda"))
    with pytest.raises(ConfigError, match="needs the dense part of the model; name it with model="):
        planner_of(H100).plan(task_on("cuda"))


def test_a_gpu_has_the_prior_of_its_dense_part() -> None:
    state = torch.random.get_rng_state()
    planner = planner_of(H100, "model=dlrm", "model.dense_layers=[512,16]")
    plan, report = planner.plan(task_on("cuda"))
    assert plan_json(plan, report)["made_from"]["sharder"]["objective"] == "step"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert isinstance(planner.sharder, SearchSharder)
    context = planner.sharder.context
    assert context.step_model is not None
    cluster = context.step_model(context.pricing_for("it")(task_on("cuda")))
    assert cluster.overlap.exchanges
    assert cluster.overlap.next_ids
    assert cluster.dense.by_rank[0].bottom_forward_ms > 0
    assert cluster.dense.all_reduce_ms > 0


def test_the_pipeline_is_that_of_the_steps() -> None:
    data = ["data=synthetic", "data.max_rows=100"]
    cfg = composed_config("train", *data, "trainer.pipeline=semi_sync", "sharder=search")
    cfg.sharder.objective = "step"
    sharder = build_planner(cfg, H100).sharder
    assert isinstance(sharder, SearchSharder)
    context = sharder.context
    assert context.step_model is not None
    cluster = context.step_model(context.pricing_for("it")(task_on("cuda")))
    assert cluster.overlap.next_lookup == "top_backward"


def test_a_model_that_changes_no_plan_is_refused(composed: Compose) -> None:
    check_effects(composed("plan", "task=task.json", "sharder.objective=step", "model=dlrm"))
    with pytest.raises(ConfigError, match=r"depend on it with sharder\.objective=step alone"):
        check_effects(composed("plan", "task=task.json", "model=dlrm"))
