"""Optimizers that are fused into a model's tables count as memory, and may forbid replicas."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dlrm_sharded import ShardedPlanner, Topology
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.model.fused_optimizers import fuse
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.torchrec_modules import table_configs
from tests.unit.drop_in.test_sharded_planner import META, ROWS, bags, plan

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


def test_a_replica_does_not_leave_a_fused_optimizer():
    model = bags()
    fuse("sgd", [model.embedding_bags["t3"].weight], 0.1)
    with pytest.raises(ConfigError, match=r"'t3' of EmbeddingBagCollection has a fused optimizer"):
        plan(model, GreedySharder("dim"), replicas=True)
