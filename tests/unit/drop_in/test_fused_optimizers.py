"""Optimizers that are fused into a model's tables count as memory."""

import json

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dlrm_sharded import ShardedPlanner, Topology
from dlrm_sharded.drop_in.find_tables import find_tables
from dlrm_sharded.drop_in.optimizer_state import optimizer_of_tables
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError, InvalidPlanError
from dlrm_sharded.model.fused_optimizers import EMBEDDING_OPTIMIZERS, fuse
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.torchrec_modules import (
    LaidOut,
    OnlyReplicas,
    OnlyReplicasOfSequences,
    table_configs,
)
from tests.unit.drop_in.synthetic import (
    META,
    ROWS,
    SHARDERS,
    TOPOLOGY,
    bags,
    columns,
    plan,
    sequences,
)

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


@pytest.mark.parametrize("name", EMBEDDING_OPTIMIZERS)
def test_costs_and_runs_know_the_fused_optimizer(name):
    model = bags()
    fuse(name, model.parameters(), 0.1)
    assert optimizer_of_tables(find_tables(model, get_default_sharders(), TOPOLOGY)) == name


def test_an_optimizer_that_cannot_be_fused():
    model = bags()
    apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"'t0' has the fused optimizer AdamW"):
        plan(model, GreedySharder("dim"))


def test_a_table_that_is_pinned_to_replicas_under_adam_is_refused():
    pinned = {"t1": ParameterConstraints(sharding_types=["data_parallel"])}
    model = bags()
    fuse("adam", model.parameters(), 0.1)
    with pytest.raises(InvalidPlanError, match=r"'t1' is replicated, and the optimizer .* 'adam'"):
        plan(model, GreedySharder("dim"), constraints=pinned)


@pytest.mark.parametrize(
    "make", [lambda: bags(DataType.FP16), sequences], ids=["fp16", "sequences"]
)
def test_a_sharder_of_replicas_alone_is_refused_with_the_reason(make):
    planner = ShardedPlanner(GreedySharder("dim"), topology=TOPOLOGY, cost_model=None)
    with pytest.raises(ConfigError, match=r"0' of Embed.* only data_parallel, and replicas need"):
        planner.plan(make(), [OnlyReplicas(), OnlyReplicasOfSequences()])
