"""An evaluation can be given up between batches, and unknown pipelines are refused."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.training import pipeline as pipeline_module
from dlrm_sharded.training.pipeline import evaluate
from dlrm_sharded.training.trainer_config import TrainerConfig


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


def test_an_unknown_pipeline_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"is 'fused'; known: null, base, sparse_dist$"):
        TrainerConfig(pipeline="fused")
