"""Training the dense part at once is training it by autograd and DDP."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.pipeline import make_pipeline
from dlrm_sharded.training.pipelines import PIPELINES
from tests.distributed.small_model import (
    make_sharded,
    pipelines_for,
    shares,
    train_and_evaluate,
)
from tests.preloaded.ranks import run_ranks

pytestmark = pytest.mark.slow

KINDS = ("rows_and_columns", "replicas_and_others")


def train(rank: Rank, kind: str, pipeline: str, dense_graph: bool) -> list[float]:
    """Losses of rank 0, whose own samples and those of all ranks decide them."""
    return train_and_evaluate(rank, kind, shares(rank), pipeline=pipeline, dense_graph=dense_graph)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trains_as_without(num_ranks, kind):
    expected = run_ranks(train, num_ranks, kind, "base", False)
    for name in pipelines_for(kind):
        if PIPELINES[name].is_exact:
            found = run_ranks(train, num_ranks, kind, name, True)
            assert found == pytest.approx(expected, rel=1e-6), name


def weights_of_dense_part(rank: Rank) -> dict[str, Any]:
    """How the model is wrapped, and rank 1's dense weights, which were others at first."""
    from tests.distributed import small_model

    model = small_model.make_model(rank.device, dense_graph=True)
    with torch.no_grad():
        for weight in model.dense_arch.parameters():
            weight.add_(rank.rank)
    plan = small_model.make_plan("table_wise", rank.world_size)
    sharded, _ = small_model.shard(rank, model, plan, small_model.optimizers("sgd"))
    own = torch.cat([weight.detach().flatten() for weight in model.dense_arch.parameters()])
    return {
        "weights": small_model.gathered(rank, own),
        "has_ddp": any(isinstance(m, DistributedDataParallel) for m in sharded.modules()),
    }


def test_ranks_begin_with_the_weights_of_rank_0_and_without_ddp():
    found = run_ranks(weights_of_dense_part, 2)
    assert torch.equal(*found["weights"])
    assert not found["has_ddp"]


def refusal(rank: Rank) -> str:
    sharded, optimizer = make_sharded(rank, "table_wise", "sgd", dense_graph=True)
    with pytest.raises(ConfigError) as error:
        make_pipeline("semi_sync", sharded, optimizer, rank.device)
    return str(error.value)


def test_no_step_begins_before_the_last_one_has_used_its_gradients():
    assert "trainer.pipeline=semi_sync" in run_ranks(refusal, 1)
