"""TorchRec's collective planning with our sharders, from TorchRec 1.9 on."""

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded import ShardedPlannerProvider
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.torchrec_modules import table_configs
from tests.preloaded.ranks import gathered, run_ranks

HAS_SEAMS = importlib.util.find_spec("torchrec.distributed.planner.provider") is not None

pytestmark = pytest.mark.skipif(
    not HAS_SEAMS, reason="this TorchRec has no PlannerProvider; install torchrec >= 1.9"
)


def plan_and_look_up(rank: Rank) -> dict[str, Any]:
    """Plan by TorchRec's orchestrator of jobs, and look up with the plan."""
    from torchrec.distributed.planner.api import ProductionPlannerOrchestrator
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.types import PlannerSessionContext, ShardingPlanRequest

    tables = table_configs([30, 20, 40], [8, 16])
    model = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    request = ShardingPlanRequest(
        model=model,
        sharders=get_default_sharders(),
        world_size=2,
        local_world_size=2,
        batch_size=4,
        compute_device="cpu",
        ddr_gb=0.5,
    )
    executor = DefaultPlannerExecutor(ShardedPlannerProvider("size", cost_model=None))

    def planned(request: ShardingPlanRequest) -> Any:
        session = PlannerSessionContext(request=request, results={})
        return ProductionPlannerOrchestrator(executor, sku="here").plan(request, session)["here"]

    result = planned(request)
    sharded = DistributedModelParallel(model, plan=result.sharding_plan, device=rank.device)
    keys = [table.feature_names[0] for table in tables]
    ids = torch.arange(4).repeat(len(keys))
    lengths = torch.ones(4 * len(keys), dtype=torch.int32)
    vectors = sharded(KeyedJaggedTensor(keys, ids, lengths=lengths)).to_dict()
    small = planned(dataclasses.replace(request, ddr_gb=1e-9))
    own = {
        "ranks": {name: p.ranks for name, p in result.sharding_plan.plan[""].items()},
        "options": len(result.sharding_options),
        "ddr_bytes": result.estimated_max_ddr_bytes,
        "shapes": [tuple(vector.shape) for vector in vectors.values()],
        "small": (small.success, small.planner_error_type.name),
    }
    return {"ranks": gathered(rank, own)}


def test_all_ranks_get_the_plan_of_rank_0() -> None:
    first, second = run_ranks(plan_and_look_up, 2)["ranks"]
    assert first["ranks"] == second["ranks"]
    assert {rank for ranks in first["ranks"].values() for rank in ranks} == {0, 1}
    assert first["shapes"] == second["shapes"]
    assert [shape[0] for shape in first["shapes"]] == [4, 4, 4]
    assert (first["options"], second["options"]) == (3, 0)
    assert first["ddr_bytes"] > 0
    assert first["small"] == second["small"] == (False, "INSUFFICIENT_STORAGE")
