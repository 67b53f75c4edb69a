"""Tables that constraints or sharders replicate, in models that are not ours, train as alone."""

import functools
from typing import Any

import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_sharded import ShardedPlanner
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.module_kinds import KINDS, features
from tests.distributed.test_module_kinds import _distance, make, tables
from tests.distributed.torchrec_modules import local_weights
from tests.preloaded.ranks import gathered, run_ranks

pytestmark = pytest.mark.slow

RULES: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2}),
}
CASES = [
    ("bags", "sgd", "half"),
    ("bags pooled by the mean", "rowwise_adagrad", "half"),
    ("bags", "rowwise_adagrad", "all"),
]
"""Kind of module, optimizer of all tables, and the tables that are replicated: `half` by their
constraints, `all` by the only type that their sharder offers."""


class OnlyReplicas(EmbeddingBagCollectionSharder):
    """Offers one type and its kernel, as sharders in TorchRec's own tests do."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["data_parallel"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["dense"]


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(features("bags", step, rank)).square().sum()


def train_alone(kind: str, rule: str, world_size: int) -> torch.nn.Module:
    model = make(KINDS[kind])
    optimizer, options = RULES[rule]
    alone = optimizer(model.parameters(), **options)
    for step in range(3):
        losses = [loss_of(model, step, rank) for rank in range(world_size)]
        (sum(losses, torch.zeros(())) / world_size).backward()
        alone.step()
        alone.zero_grad()
    return model


def train_sharded(rank: Rank) -> list[dict[str, Any]]:
    return [_train(rank, *case) for case in CASES]


def _train(rank: Rank, kind: str, rule: str, replicated: str) -> dict[str, Any]:
    model, expected = make(KINDS[kind]), tables(train_alone(kind, rule, rank.world_size))
    before = {name: weight.clone() for name, weight in tables(model).items()}
    optimizer, options = RULES[rule]
    options = dict(options)  # TorchRec changes what it is given
    apply_optimizer_in_backward(optimizer, model.parameters(), options)
    sharders: list[Any] = [OnlyReplicas()]
    constraints: dict[str, ParameterConstraints] = {}
    if replicated == "half":
        sharders = get_default_sharders()
        pinned = ParameterConstraints(sharding_types=["data_parallel"])
        constraints = {"t1": pinned, "t3": pinned}
    planner = ShardedPlanner(GreedySharder("dim"), constraints=constraints, cost_model=None)
    plan = planner.collective_plan(model, sharders)
    sharded = DistributedModelParallel(model, plan=plan, device=rank.device, sharders=sharders)
    assert planner.report is not None
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    replicas = KeyedOptimizerWrapper(dense, lambda weights: optimizer(weights, **RULES[rule][1]))
    combined = CombinedOptimizer([sharded.fused_optimizer, replicas])
    for name, place, weight in local_weights(tables(sharded)):
        weight.copy_(before[name][place])
    for step in range(3):
        combined.zero_grad()
        loss_of(sharded, step, rank.rank).backward()
        combined.step()
    pairs = [(name, w, expected[name][place]) for name, place, w in local_weights(tables(sharded))]
    errors = gathered(rank, max(_distance(one, other) for _, one, other in pairs))
    (module_plan,) = plan.plan.values()
    return {
        "error": max(errors),
        "least_change": min(_distance(expected[name], before[name]) for name in before),
        "types": [parameter.sharding_type for parameter in module_plan.values()],
        "report": str(planner.report),
    }


@functools.cache
def results() -> list[dict[str, Any]]:
    """All cases in one start of the processes."""
    return run_ranks(train_sharded, 2)


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(case) for case in CASES])
def test_the_dense_optimizer_trains_replicas_as_one_process(case: int) -> None:
    result = results()[case]
    num_replicated = {"half": 2, "all": 4}[CASES[case][2]]
    assert result["types"].count("data_parallel") == num_replicated
    assert result["least_change"] > 1e-3
    assert result["error"] < 1e-5
    assert f"{num_replicated} of them replicated (the dense optimizer has" in result["report"]
