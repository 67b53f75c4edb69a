"""An evaluation can be given up between batches, and pipelines refuse what they would not train."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torchrec.distributed.train_pipeline import train_pipelines

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.plans.layouts import Replicas
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.training import pipeline as pipeline_module
from dlrm_sharded.training.pipeline import CLASSES, NEED_STREAMS, check_pipeline, evaluate
from dlrm_sharded.training.pipelines import PIPELINES
from dlrm_sharded.training.trainer_config import TrainerConfig

TABLE = Table("t", 10, 4, 1.0)


class Doubled(torch.nn.Module):
    """Its logits are twice the batch."""

    def forward(self, batch: torch.Tensor) -> tuple[Any, tuple[Any, torch.Tensor, torch.Tensor]]:
        return None, (None, 2 * batch, (batch > 0).float())


@pytest.mark.parametrize("stops", [None, False, True])
def test_evaluation_is_given_up_only_if_told(stops, rank, monkeypatch):
    monkeypatch.setattr(pipeline_module, "fused_steps_kept", nullcontext)  # there are no tables
    batches = iter([torch.tensor([-1.0, 1.0])] * 3)
    is_stopped = None if stops is None else lambda: bool(stops)
    model: Any = Doubled()
    model._compiled_call_impl = compiled = Mock(side_effect=AssertionError)
    pipeline: Any = None
    found = evaluate(model, pipeline, batches, rank.device, is_stopped=is_stopped)
    assert (found is None) == bool(stops)
    assert len(list(batches)) == (2 if stops else 0)
    assert model.training
    assert model._compiled_call_impl is compiled, "which would be compiled for evaluations as well"


PLANS = {
    "whole": ShardingPlan(2, (Shard.whole(TABLE, 0),)),
    "replicas": ShardingPlan(2, tuple(Replicas(2).shards(TABLE))),
}
REFUSED = {
    ("fused_sparse_dist", "replicas"): "replicated tables, and the plan has some",
    ("semi_sync", "replicas"): "replicated tables, and the plan has some",
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_plan_that_a_pipeline_would_not_train_rightly_is_refused(name, plan):
    reason = REFUSED.get((name, plan))
    if reason is None:
        check_pipeline(name, PLANS[plan], "cuda")
        return
    with pytest.raises(ConfigError, match=rf"trainer.pipeline={name} .*{reason}; take sparse_dist"):
        check_pipeline(name, PLANS[plan], "cuda")


@pytest.mark.parametrize("name", PIPELINES)
def test_a_torchrec_that_lacks_a_pipeline_is_named(name, monkeypatch):
    monkeypatch.delattr(train_pipelines, CLASSES[name])
    said = rf"{name} needs TorchRec's {CLASSES[name]}, .* torchrec 1\.6 to 1\.9 have it"
    with pytest.raises(ConfigError, match=said):
        check_pipeline(name, PLANS["whole"], "cuda")


def test_an_unknown_pipeline_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"is 'fused'; known: null, base, .*semi_sync"):
        TrainerConfig(pipeline="fused")
    with pytest.raises(ConfigError, match=r"^trainer\.pipeline=prefetch .*; use sparse_dist$"):
        TrainerConfig(pipeline="prefetch")
    with pytest.raises(ConfigError, match=r"trainer\.semi_sync_after is -1"):
        TrainerConfig(semi_sync_after=-1)


def test_a_default_by_earlier_runs_is_no_choice_any_more():
    with pytest.raises(ConfigError, match=r"^trainer\.pipeline=auto was removed in 0.3"):
        TrainerConfig(pipeline="auto")


@pytest.mark.parametrize("name", NEED_STREAMS)
def test_a_pipeline_that_needs_streams_is_refused_on_a_cpu(name):
    with pytest.raises(ConfigError, match=f"trainer.pipeline={name} .* base or sparse_dist"):
        check_pipeline(name, PLANS["whole"], "cpu")


def test_a_checkpoint_waits_for_updates_on_another_stream(monkeypatch):
    """Those of tables whose lookup a pipeline runs on a stream of its own."""
    waited: list[Any] = []
    current = SimpleNamespace(wait_stream=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    for stream, device in (("data", "cpu"), (None, "cuda"), ("data", "cuda")):
        pipeline: Any = SimpleNamespace(_data_dist_stream=stream)
        pipeline_module.settle("base", pipeline, torch.device(device), 1)
    assert waited == ["data"]
