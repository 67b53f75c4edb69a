"""Plans are measured on the device that is used, and what was measured on another one is not."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

from dlrm_sharded.contest import plan_measurements
from dlrm_sharded.contest.cases import Measurement
from dlrm_sharded.contest.plan_measurements import MEASUREMENTS, measure_tasks
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.ranks.distributed import Rank
from tests.unit.contest.entries import TASK, case_of, cost_of, entry_of

SHARDS = ShardingPlan.from_ranks(TASK, [0] * len(TASK.tables)).shards
RANK = Rank(0, 1, 0, 1, torch.device("cuda", 0))


SHORT = {"rounds": 1, "iterations": 1, "seed": 0}


def test_a_rank_must_fit_the_device_that_measures(monkeypatch, tmp_path):
    """A GPU has other memory than its host."""
    monkeypatch.setattr(plan_measurements, "process_group", lambda: nullcontext(RANK))
    monkeypatch.setattr(plan_measurements, "free_bytes", lambda *_: 1000)
    with pytest.raises(ConfigError, match=r"has 5,920 B .* half of the 1,000 B .* on this cuda"):
        measure_tasks([entry_of("t", "a", 1.0, shards=SHARDS)], tmp_path, **SHORT)


def test_measurements_of_another_device_are_not_taken_over(tmp_path, monkeypatch):
    topology = dataclasses.replace(TASK.topology, compute_device="cuda")
    case = case_of(task=dataclasses.replace(TASK, topology=topology))
    entry = dataclasses.replace(entry_of("t", "a", 1.0), case=case)
    measured = Measurement({"a": (1.0,)}, {"a": cost_of(1.0, 2.0)})
    monkeypatch.setattr(plan_measurements, "_measured", lambda *args, **options: measured)
    monkeypatch.setattr(plan_measurements, "device_type", lambda: "cuda")
    monkeypatch.setattr(plan_measurements, "process_group", lambda: nullcontext(RANK))
    num_measured = []
    for name in ("NVIDIA H200", "NVIDIA H100", "NVIDIA H200"):
        monkeypatch.setattr(plan_measurements, "device_name", lambda device, name=name: name)
        measure_tasks([entry], tmp_path, **SHORT)
        num_measured.append(len((tmp_path / MEASUREMENTS).read_text().splitlines()))
    assert num_measured == [1, 2, 2]
