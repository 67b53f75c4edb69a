"""An evaluation can be given up between batches."""

from typing import Any

import pytest
import torch

from dlrm_sharded.training.pipeline import evaluate


class Doubled(torch.nn.Module):
    """Its logits are twice the batch."""

    def forward(self, batch: torch.Tensor) -> tuple[Any, tuple[Any, torch.Tensor, torch.Tensor]]:
        return None, (None, 2 * batch, (batch > 0).float())


@pytest.mark.parametrize("stops", [None, False, True])
def test_evaluation_is_given_up_only_if_told(stops, rank):
    batches = iter([torch.tensor([-1.0, 1.0])] * 3)
    is_stopped = None if stops is None else lambda: bool(stops)
    model: Any = Doubled()
    pipeline: Any = None
    found = evaluate(model, pipeline, batches, rank.device, is_stopped=is_stopped)
    assert (found is None) == bool(stops)
    assert len(list(batches)) == (2 if stops else 0)
    assert model.training
