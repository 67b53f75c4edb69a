"""The overlapping pipeline takes hold of the sharded collection inside our model."""

import contextlib
from typing import Any

import pytest
import torch

from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.pipeline import make_pipeline
from tests.distributed.small_model import make_sharded, shares
from tests.preloaded.ranks import run_ranks


def train(rank: Rank, name: str) -> dict[str, Any]:
    sharded, optimizer = make_sharded(rank, "columns_uneven", "sgd")
    pipeline = make_pipeline(name, sharded, optimizer, rank.device)
    batches, losses = iter(shares(rank)), []
    with contextlib.suppress(StopIteration):
        while True:
            losses.append(pipeline.progress(batches)[0])
    pipelined = getattr(pipeline, "_pipelined_modules", [])
    return {"losses": torch.stack(losses), "num_pipelined": len(pipelined)}


def test_pipelines_the_lookup():
    overlapped = run_ranks(train, 2, "sparse_dist")
    plain = run_ranks(train, 2, "base")
    assert overlapped["num_pipelined"] == 1
    torch.testing.assert_close(overlapped["losses"], plain["losses"])


@pytest.mark.parametrize("name", ["auto", "base"])
def test_plain_on_a_cpu(name):
    assert run_ranks(train, 1, name)["num_pipelined"] == 0
