"""Optimizers that are fused into a model's tables count as memory, and may forbid replicas."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dlrm_sharded import ShardedPlanner, Topology
from dlrm_sharded.drop_in.replica_training import FusedRule
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.model.fused_optimizers import EMBEDDING_OPTIMIZERS, fuse
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.torchrec_modules import LaidOut, table_configs
from tests.unit.drop_in.made_up import META, ROWS, SHARDERS, TOPOLOGY, bags, plan

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("fused_in", ["table", "sharder"])
def test_the_state_of_a_fused_optimizer_is_memory(fused_in):
    """Adam has 12 B for a weight: the tables fit two ranks without it."""
    model, sharders = bags(), get_default_sharders()
    if fused_in == "table":
        fuse("adam", model.parameters(), 0.1)
    else:
        sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM})]
    topology = Topology(2, sum(ROWS) * 64 * 4, compute_device="cpu")
    planner = ShardedPlanner(GreedySharder("dim"), topology=topology)
    planner.plan(bags(), get_default_sharders())
    with pytest.raises(InfeasibleTaskError, match=f"need {sum(ROWS) * 64 * 12:,} B"):
        planner.plan(model, sharders)


def test_an_optimizer_of_another_type_is_refused():
    sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": "adam"})]
    with pytest.raises(ConfigError, match="Sharder names the optimizer 'adam'"):
        ShardedPlanner(GreedySharder("dim")).plan(bags(), sharders)


def test_the_optimizer_of_a_fused_module_is_memory():
    """Adagrad has 8 B for a weight."""
    model = FusedEmbeddingBagCollection(
        table_configs(ROWS, [64]),
        optimizer_type=torch.optim.Adagrad,
        optimizer_kwargs={"lr": 0.1},
        device=META,
    )
    with pytest.raises(InfeasibleTaskError, match=f"need {sum(ROWS) * 64 * 8:,} B"):
        plan(model, GreedySharder("dim"), Topology(2, sum(ROWS) * 64 * 3, compute_device="cpu"))


def test_an_optimizer_that_cannot_be_fused():
    model = bags()
    apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"'t0' has the fused optimizer AdamW"):
        plan(model, GreedySharder("dim"))


@pytest.mark.parametrize(
    ("optimizer", "options", "names", "may_be"),
    [
        ("sgd", {"lr": 0.1}, ROWS, "all"),
        ("rowwise_adagrad", {"lr": 0.1, "eps": 1e-3}, ROWS, "all"),
        ("sgd", {"lr": 0.1, "weight_decay": 0.1}, ROWS, "none"),
        ("adam", {"lr": 0.1}, ROWS, "none"),
        ("sgd", {"lr": 0.1}, [3], "others"),
        ("adam", {"lr": 0.1}, [3], "others"),
    ],
)
def test_a_replica_does_not_leave_a_fused_optimizer(optimizer, options, names, may_be):
    """It needs an optimizer that replicas can follow, and the one of most tables of the module."""
    model = bags()
    fused = [f"t{i}" for i in (range(len(ROWS)) if names is ROWS else names)]
    weights = [model.embedding_bags[name].weight for name in fused]
    apply_optimizer_in_backward(EMBEDDING_OPTIMIZERS[optimizer], weights, options)
    seen = []
    sharder = LaidOut(lambda table, i, world_size: seen.append(table) or [Shard.whole(table, 0)])
    plan(model, sharder, replicas=True)
    replicable = {table.name for table in seen if "replicas" in table.layouts}
    everything = {table.name for table in seen}
    assert replicable == {"all": everything, "none": set(), "others": everything - {"t3"}}[may_be]


def test_a_table_that_is_pinned_to_replicas_has_an_optimizer_that_they_follow():
    pinned = {"t1": ParameterConstraints(sharding_types=["data_parallel"])}
    model = bags()
    fuse("sgd", model.parameters(), 0.1)
    assert plan(model, GreedySharder("dim"), constraints=pinned)[""]["t1"].ranks == [0, 1, 2, 3]
    model = bags()
    fuse("adam", model.parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"'t1' .*constraints allow only data_parallel"):
        plan(model, GreedySharder("dim"), constraints=pinned)


def test_replicas_follow_the_optimizer_that_a_sharder_states():
    sharders = [
        EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.3}
        )
    ]
    planner = ShardedPlanner(
        SHARDERS["torchrec_dp"](), topology=TOPOLOGY, replicas=True, cost_model=None
    )
    planner.plan(bags(), sharders)
    assert planner.report.replica_rules == {"": FusedRule("sgd", 0.3)}
