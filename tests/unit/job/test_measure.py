"""A run says truthfully whether the journal has its measurement, and which GPU disturbed it."""

import dataclasses
import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dlrm_sharded.calibration.disturbance import Disturbance
from dlrm_sharded.calibration.sample_store import SampleStore, sample_of_run
from dlrm_sharded.checkpoint.saver import CheckpointConfig
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.job import measure_run
from dlrm_sharded.job.measure_run import note_run
from dlrm_sharded.measuring.measure import MeasuredCost
from dlrm_sharded.plans.plan_report import PlanReport
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.ranks.gpus import GpuState, GpuStates
from dlrm_sharded.ranks.machine_load import MachineLoad
from dlrm_sharded.training.trainer_config import TrainerConfig
from tests.unit.calibration.test_sample_store import COST, PLAN, TASK
from tests.unit.synthetic import task_of

CONTEXT = RunContext("cpu", optimizer="sgd", ranks_per_host=2)
RUN = sample_of_run(PLAN, TASK, COST)


@pytest.mark.parametrize("is_file", [False, True], ids=["a_folder", "a_file"])
def test_says_whether_the_run_is_noted(tmp_path, caplog, is_file):
    cache = tmp_path / "cache"
    if is_file:
        cache.write_text("a file is in the way")
    journal = SampleStore(cache / "runs" / "hardware.jsonl")
    with caplog.at_level(logging.INFO):
        note_run(journal, CONTEXT, RUN, Disturbance())
    [said] = caplog.messages
    assert said.startswith(
        "the sample could not be added to" if is_file else "wrote the measurement to"
    )


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_says_that_a_disturbed_run_counts_less(tmp_path, caplog, is_busy):
    journal = SampleStore(tmp_path / "hardware.jsonl")
    disturbance = Disturbance(core_wait=0.4 if is_busy else 0.01)
    with caplog.at_level(logging.WARNING):
        note_run(journal, CONTEXT, RUN, disturbance)
    assert [message for message in caplog.messages if "for 40 % of the time" in message] == (
        caplog.messages if is_busy else []
    )
    assert len(caplog.messages) == is_busy


STEADY = GpuStates(GpuState(1980, 2619, 0), GpuState(1980, 2619, 0))
HOT = GpuStates(GpuState(1980, 2619, 0), GpuState(1200, 2619, 0x20))


@pytest.mark.parametrize(
    ("gpus", "num_measurements", "is_noted"),
    [
        ([()], 1, True),
        ([(STEADY,)], 1, True),
        ([(HOT,), (STEADY,)], 2, True),
        ([(HOT,)] * 2, 2, False),
    ],
    ids=["a_cpu", "steady", "throttled_once", "throttled"],
)
def test_a_throttled_gpu_is_measured_again_once(
    gpus, num_measurements, is_noted, rank, tmp_path, monkeypatch, caplog
):
    found = iter(gpus)
    measured: list[MeasuredCost] = []

    def measure(*args: Any) -> MeasuredCost:
        spread = {"fwd_compute": 0.1}
        measured.append(MeasuredCost(COST, spread, 20 + len(measured)))
        return measured[-1]

    def watch(device: object) -> Any:
        conclude = lambda: MachineLoad({"here": 0.5}, 0.0, 0.0, next(found))  # noqa: E731
        return SimpleNamespace(conclude=conclude)

    monkeypatch.setattr(measure_run, "_measure_embeddings", measure)
    monkeypatch.setattr(measure_run, "LoadWatch", watch)
    store = SampleStore(tmp_path / "hardware.jsonl")
    prepared: Any = SimpleNamespace(
        rank=rank, settings=None, planner=None, store=store, context=CONTEXT
    )
    planned: Any = SimpleNamespace(task=TASK, plan=PLAN, report=PlanReport("dim", 0.1))
    built: Any = None
    with caplog.at_level(logging.INFO):
        result = measure_run.measure_cost(prepared, planned, built)
    assert len(measured) == num_measurements
    assert result.iterations == measured[-1].iterations
    assert result.gpus == gpus[-1]
    again = [line for line in caplog.messages if line.startswith("the embedding cost is measured")]
    assert len(again) == num_measurements - 1
    assert ("wrote the measurement to" in caplog.text) == store.path.exists() == is_noted


def test_a_round_trains_as_the_run_without_its_evaluations(monkeypatch, rank, tmp_path):
    """A task.json does not have the names of features, and the data has."""
    table = Table("item", 100, 8, 2.0, num_features=2, features=("seen", "bought"))
    written = task_of([dataclasses.replace(table, features=())], 1, 10**9, 4)
    seen: dict[str, Any] = {}

    def build(settings: Any, rank: Rank, plan: Any, task: Any) -> MagicMock:
        seen.update(tables=task.tables)
        built = MagicMock()
        built.trainer = lambda *_, config, **__: seen.update(config=config)
        return built

    for name, value in {
        "owned_folder": lambda *_: nullcontext(MagicMock()),
        "read_plan": lambda _: MagicMock(),
        "read_task": lambda _: written,
        "with_precisions": lambda task, _: task,
        "build": build,
        "_measure_embeddings": lambda *_: MagicMock(),
    }.items():
        monkeypatch.setattr(measure_run, name, value)
    settings = MagicMock(dataset=MagicMock(tables=(table,)))
    settings.trainer = TrainerConfig(
        eval_every_steps=1,
        keep_best="auroc",
        patience=1,
        checkpoint=CheckpointConfig(every_steps=1),
    )
    with pytest.raises(AttributeError):  # there is no trainer to run
        measure_run.measure_round(settings, rank, tmp_path, 0, 0, 0, num_steps=7)
    assert seen["tables"] == (table,)
    assert seen["config"] == TrainerConfig(num_steps=12, num_eval_batches=0)
