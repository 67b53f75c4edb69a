"""A training is spared the work that TorchRec does for nobody, and nothing else."""

import inspect

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.distributed import dist_data, embedding_sharding
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.sparse import jagged_tensor

from dlrm_sharded.model.torchrec_overhead import (
    USE,
    Region,
    pass_unused_checks_by,
    record_always,
    record_for_profilers_only,
)

DEFINITION = "def _safe_tolist(tensor): return tensor.tolist()\n"
NAME = "_safe_tolist"


def theirs(sizes):
    raise AssertionError("TorchRec waits")


@pytest.fixture
def version(monkeypatch):
    """Stand in for a version of TorchRec: its source, and whether it checks."""

    def stand_in(source: str, *, checks: bool | None = False) -> None:
        monkeypatch.setattr(embedding_sharding, NAME, theirs, raising=False)
        monkeypatch.setattr(inspect, "getsource", lambda module: source)
        monkeypatch.delattr(dist_data, "_TORCHREC_OVERFLOW_DEBUG", raising=False)
        if checks is not None:
            monkeypatch.setattr(dist_data, "_TORCHREC_OVERFLOW_DEBUG", checks, raising=False)

    return stand_in


@pytest.mark.parametrize(
    ("source", "checks", "passed_by"),
    [
        (DEFINITION + USE, False, True),
        (DEFINITION + USE, True, False),
        (DEFINITION + USE, None, False),
        (DEFINITION + "splits = _safe_tolist(t)", False, False),
        (DEFINITION + USE + "t)\nsplits = _safe_tolist(t)", False, False),
    ],
    ids=["unused", "checked", "without_the_check", "used", "used_elsewhere"],
)
def test_only_unused_numbers_are_not_waited_for(source, checks, passed_by, version):
    version(source, checks=checks)
    assert pass_unused_checks_by() is passed_by
    if passed_by:
        assert getattr(embedding_sharding, NAME)(object()) == []
    else:
        assert getattr(embedding_sharding, NAME) is theirs


def test_regions_are_for_profilers():
    """A region may be used again, with and without a profiler."""
    region = Region("## forward 1 ##")
    with region:
        assert region.record is None
    with profile(activities=[ProfilerActivity.CPU]) as profiler, region:
        torch.zeros(1).add_(1)
    with region:
        assert region.record is None
    recorded = [event for event in profiler.events() if event.name == region.name]
    assert len(recorded) == 1
    assert "aten::add_" in [event.name for event in recorded[0].cpu_children]


def test_regions_of_torchrecs_steps_are_spared(monkeypatch):
    monkeypatch.setattr(train_pipelines, "record_function", record_function)
    monkeypatch.setattr(jagged_tensor, "record_function", record_function)
    assert record_for_profilers_only() >= 1
    assert train_pipelines.record_function is Region
    assert jagged_tensor.record_function is record_function  # it is compiled as a script
    assert record_always() >= 1
    assert train_pipelines.record_function is record_function
    monkeypatch.setattr(train_pipelines, "record_function", None)
    record_for_profilers_only()
    assert train_pipelines.record_function is None
