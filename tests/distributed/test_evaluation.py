"""The evaluation is of all ranks together, and all ranks have it."""

import dataclasses
from typing import Any

import pytest
import torch

from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.metrics import Evaluator
from tests.preloaded.ranks import gathered, run_ranks

pytestmark = pytest.mark.slow
LOGITS = torch.tensor([-2.0, 0.5, -1.0, 0.25, 1.5, -0.5, 2.0, 1.0])
LABELS = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0])
"""The first half, which is the share of rank 0 of 2, has one class only."""


def evaluate(rank: Rank) -> list[dict[str, Any]]:
    evaluator = Evaluator(rank.device)
    share = slice(rank.rank * 8 // rank.world_size, (rank.rank + 1) * 8 // rank.world_size)
    evaluator.update(LOGITS[share].to(rank.device), LABELS[share].to(rank.device))
    return gathered(rank, dataclasses.asdict(evaluator.compute()))


def test_ranks_evaluate_together():
    (alone,) = run_ranks(evaluate, 1)
    together = run_ranks(evaluate, 2)
    assert together == [together[0]] * 2
    assert together[0]["num_samples"] == 8
    torch.testing.assert_close(together[0]["auroc"], alone["auroc"])
    torch.testing.assert_close(together[0]["normalized_entropy"], alone["normalized_entropy"])
    assert alone["auroc"] == 1.0
