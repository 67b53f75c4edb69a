"""`trainer.pipeline=auto` is another pipeline only if runs here have shown that it is faster."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dlrm_sharded.fitting.run_journal import RunJournal
from dlrm_sharded.fitting.step_journal import MeasuredStep
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.job import train
from dlrm_sharded.job.pipeline_choice import MIN_RUNS, _candidates, chosen_trainer, fastest
from dlrm_sharded.job.predicted_step import step_journal
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.plans.layouts import Replicas
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import PlanCost, StageCost
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.step.prediction import DensePart
from dlrm_sharded.training.trainer import TrainerConfig
from tests.unit.step.made_up import dense_times

CONTEXT = RunContext("cpu", optimizer="sgd", ranks_per_host=1)
TABLE = Table("t", 10, 4, 1.0)
WHOLE = ShardingPlan(1, (Shard.whole(TABLE, 0),))
REPLICAS = ShardingPlan(1, tuple(Replicas(1).shards(TABLE)))
COST = PlanCost((StageCost(10, 4, 5, 20),), input_dist_ms=(3.0,))
MEASURED = MeasuredCost(COST, {}, 1)
DENSE = DensePart((dense_times(optimizer_ms=2.0),), 1.0)


@pytest.mark.parametrize(
    ("steps_ms", "expected"),
    [
        ({}, "base"),
        ({"other": (1.0, 0.01)}, "base"),
        ({"base": (10.0, 0.01), "other": (9.0, 0.05)}, "other"),
        ({"base": (10.0, 0.01), "other": (9.0, 0.2)}, "base"),
        ({"base": (10.0, 0.01), "other": (9.0, 0.05), "third": (8.0, 0.05)}, "third"),
        ({"base": (10.0, 0.01), "other": (11.0, 0.05)}, "base"),
    ],
    ids=["nothing", "no_default", "faster", "within_its_error", "fastest", "slower"],
)
def test_the_default_is_left_for_what_is_faster_by_more_than_its_error(steps_ms, expected):
    assert fastest(steps_ms, "base") == expected


def chosen(rank: Any, journal: RunJournal | None, plan: ShardingPlan, asked: str) -> str:
    settings = SimpleNamespace(trainer=TrainerConfig(pipeline=asked), batch_size=4, seed=0)
    prepared: Any = SimpleNamespace(settings=settings, rank=rank, journal=journal, context=CONTEXT)
    return chosen_trainer(prepared, plan, MEASURED, DENSE).pipeline


def note(rank: Any, journal: RunJournal, name: str, factor: float, num_runs: int) -> None:
    steps = step_journal(journal, CONTEXT, TrainerConfig(pipeline=name), rank)
    assert steps is not None
    for _ in range(num_runs):
        assert steps.append(MeasuredStep(100.0, 100.0 * factor))


@pytest.mark.parametrize(
    ("notes", "plan", "asked", "expected"),
    [
        ([], WHOLE, "auto", "base"),
        ([("base", 1.0, 9), ("sparse_dist_lite", 0.5, MIN_RUNS - 1)], WHOLE, "auto", "base"),
        ([("sparse_dist_lite", 0.5, 9)], WHOLE, "auto", "base"),
        ([("base", 1.0, 9), ("sparse_dist_lite", 0.5, 9)], WHOLE, "auto", "sparse_dist_lite"),
        ([("base", 1.0, 9), ("sparse_dist_lite", 0.5, 9)], REPLICAS, "auto", "sparse_dist_lite"),
        ([("base", 1.0, 9), ("sparse_dist_lite", 0.5, 9)], WHOLE, "semi_sync", "semi_sync"),
        ([("base", 1.0, 9), ("semi_sync", 0.3, 9)], WHOLE, "auto", "base"),
        ([("base", 1.0, 9), ("sparse_dist", 0.3, 9)], WHOLE, "auto", "base"),
    ],
    ids=[
        *("no_runs", "few_runs", "no_runs_of_the_default", "faster", "replicas", "not_auto"),
        *("other_losses", "more_memory"),
    ],
)
def test_auto_is_what_was_measured_here(notes, plan, asked, expected, rank, tmp_path):
    journal = RunJournal(tmp_path / "hardware.jsonl")
    for name, factor, num_runs in notes:
        note(rank, journal, name, factor, num_runs)
    assert chosen(rank, journal, plan, asked) == expected


def test_auto_without_a_journal_is_the_default(rank):
    assert chosen(rank, None, WHOLE, "auto") == "base"


@pytest.mark.parametrize(
    ("default", "plan", "expected"),
    [
        ("base", WHOLE, ["base", "sparse_dist_lite"]),
        ("sparse_dist", WHOLE, ["base", "sparse_dist", "sparse_dist_lite", "fused_sparse_dist"]),
        ("sparse_dist", REPLICAS, ["base", "sparse_dist", "sparse_dist_lite"]),
    ],
    ids=["cpu", "gpu", "replicas_on_gpu"],
)
def test_only_pipelines_that_train_alike_in_the_estimated_memory_are_candidates(
    default, plan, expected
):
    assert list(_candidates(default, plan)) == expected


def test_the_training_gets_the_chosen_pipeline(monkeypatch):
    trainer, chosen_config = Mock(), TrainerConfig(pipeline="sparse_dist_lite")
    monkeypatch.setattr(train, "Trainer", trainer)
    monkeypatch.setattr(train, "LambdaLR", Mock())
    settings = Mock(trainer=TrainerConfig())
    prepared = Mock(settings=settings, streams={"train": None, "val": None})
    prepared.folder.path = Path()
    measured = Mock(trainer=chosen_config)
    train._trainer(Mock(), prepared, Mock(), Mock(), measured, Mock())
    assert trainer.call_args.kwargs["config"] == chosen_config
