"""`ShardedPlanner` keeps towers on one host."""

import dataclasses

import pytest
from torch import nn
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dlrm_sharded import ShardedPlanner, Topology
from dlrm_sharded.files.errors import ConfigError, InvalidPlanError
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.torchrec_modules import LaidOut
from tests.unit.drop_in.made_up import TOPOLOGY, bags, columns, host_rows, types


class Interaction(nn.Module):
    """The dense part of a tower."""


def test_towers_on_cpus_are_refused_with_the_sharders_to_leave_out():
    """TorchRec gives DistributedDataParallel the CPU as a device id."""
    cpus = Topology(2, 10**9, compute_device="cpu")
    planner = ShardedPlanner(GreedySharder("dim"), topology=cpus)
    with pytest.raises(ConfigError, match=r"'t0' of EmbeddingTower .* leave EmbeddingTowerSharder"):
        planner.plan(EmbeddingTower(bags(), Interaction()), [EmbeddingTowerSharder()])
    planned = planner.plan(EmbeddingTower(bags(), Interaction()), get_default_sharders())
    assert planned.plan.keys() == {"embedding"}


def test_equal_names_in_the_towers_of_one_module_are_refused():
    towers = EmbeddingTowerCollection([EmbeddingTower(bags(), Interaction()) for _ in range(2)])
    planner = ShardedPlanner(GreedySharder("dim"), topology=Topology(2, 10**9))
    with pytest.raises(ConfigError, match=r"one of two tables named 't0' there"):
        planner.plan(towers, [EmbeddingTowerCollectionSharder()])


def test_towers_stay_on_one_host():
    model = EmbeddingTower(bags(), Interaction())
    sharders = [EmbeddingTowerSharder()]
    one_host = Topology(2, 10**9)
    for sharder, expected in (
        (GreedySharder("dim"), "table_column_wise"),
        (LaidOut(columns(32, 32)), "table_column_wise"),
        (LaidOut(host_rows), "table_row_wise"),
    ):
        planned = ShardedPlanner(sharder, topology=one_host).plan(model, sharders).plan[""]
        assert types(planned) == {expected}
    on_gpus = dataclasses.replace(TOPOLOGY, compute_device="cuda")
    with pytest.raises(InvalidPlanError, match=r"is planned on the hosts \[0, 1\]"):
        ShardedPlanner(GreedySharder("dim"), topology=on_gpus).plan(model, sharders)
