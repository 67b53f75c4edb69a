"""Optimizers that are fused into a model's tables count as memory, and may forbid replicas."""

import json

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dlrm_sharded import ShardedPlanner, Topology
from dlrm_sharded.drop_in.replica_training import FusedRule
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.model.fused_optimizers import EMBEDDING_OPTIMIZERS, fuse
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.test_replicas_of_models import OnlyReplicas
from tests.distributed.torchrec_modules import LaidOut, table_configs
from tests.unit.drop_in.made_up import (
    META,
    ROWS,
    SHARDERS,
    TOPOLOGY,
    bags,
    columns,
    plan,
    sequences,
)


class OnlyReplicasOfSequences(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type):
        return ["data_parallel"]

    def compute_kernels(self, sharding_type, compute_device_type):
        return ["dense"]


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


@pytest.mark.parametrize("name", SHARDERS)
def test_the_state_of_each_table_counts_for_itself(name):
    """Adam in one table and SGD in the others fit two ranks, and Adam in all of them does not."""
    model = bags()
    for own, table in model.embedding_bags.items():
        fuse("adam" if own == "t4" else "sgd", [table.weight], 0.1)
    needed = (sum(ROWS) * 4 + ROWS[4] * 8) * 64
    topology = Topology(2, 24 * 10**6, compute_device="cpu")
    assert sum(ROWS) * 64 * 12 > 2 * topology.memory_bytes > needed
    planner = ShardedPlanner(SHARDERS[name](), topology=topology, cost_model=None)
    planner.plan(model, get_default_sharders())
    task, planned = planner.report.task, planner.report.plan
    assert task.table_bytes == sum(planned.bytes_by_rank(task.topology)) == needed
    assert task.known_optimizer is None
    read = ShardingTask.from_json(json.loads(json.dumps(task.to_json())))
    assert read.topology.optimizer_bytes_by_table == task.topology.optimizer_bytes_by_table
    assert read.table_bytes == needed


def test_row_state_of_each_table_is_that_of_its_shards():
    """Row-wise Adagrad in one table has 4 B for a row of each shard, SGD none."""
    model = bags()
    fuse("rowwise_adagrad", [model.embedding_bags["t0"].weight], 0.1)
    fuse("sgd", [model.embedding_bags[f"t{i}"].weight for i in range(1, len(ROWS))], 0.1)
    planner = ShardedPlanner(LaidOut(columns(32, 32)), topology=TOPOLOGY, cost_model=None)
    planner.plan(model, get_default_sharders())
    planned, topology = planner.report.plan, planner.report.task.topology
    of_t0, of_t2 = (planned.shards_by_table()[name] for name in ("t0", "t2"))
    assert [s.bytes_on(topology) for s in of_t0] == [ROWS[0] * (32 * 4 + 4)] * 2
    assert [s.bytes_on(topology) for s in of_t2] == [ROWS[2] * 32 * 4] * 2


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


def test_a_sharder_of_replicas_alone_gets_replicas_that_follow_the_optimizer():
    model = bags()
    fuse("rowwise_adagrad", model.parameters(), 0.1)
    planner = ShardedPlanner(GreedySharder("dim"), topology=TOPOLOGY, cost_model=None)
    planned = planner.plan(model, [OnlyReplicas()])
    assert {p.sharding_type for p in planned.plan[""].values()} == {"data_parallel"}
    assert planner.report.replica_rules == {"": FusedRule("rowwise_adagrad", 0.1)}


@pytest.mark.parametrize(
    ("make", "optimizer", "message"),
    [
        (bags, "adam", "'t0' of EmbeddingBag.*data_parallel, and a replica leaves its fused opt"),
        (lambda: bags(DataType.FP16), "sgd", "'t0' of EmbeddingBag.*data_parallel.* it is in fp16"),
        (sequences, "sgd", "'s0' of EmbeddingCollection.*data_parallel.* sequences have no replic"),
    ],
    ids=["adam", "fp16", "sequences"],
)
def test_a_sharder_of_replicas_alone_is_refused_with_the_reason(make, optimizer, message):
    model = make()
    fuse(optimizer, model.parameters(), 0.1)
    planner = ShardedPlanner(
        GreedySharder("dim"), topology=TOPOLOGY, cost_model=None, replicas=True
    )
    with pytest.raises(ConfigError, match=message):
        planner.plan(model, [OnlyReplicas(), OnlyReplicasOfSequences()])


def test_replicas_follow_the_optimizer_that_a_sharder_states():
    sharders = [
        EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.3}
        )
    ]
    planner = ShardedPlanner(
        SHARDERS["torchrec_full"](), topology=TOPOLOGY, replicas=True, cost_model=None
    )
    planner.plan(bags(), sharders)
    assert planner.report.replica_rules == {"": FusedRule("sgd", 0.3)}
