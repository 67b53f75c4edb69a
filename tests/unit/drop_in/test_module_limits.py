"""`ShardedPlanner` plans only what each kind of module trains: rows, columns or whole tables."""

import dataclasses
from typing import Any

import pytest
from torch import nn
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from torchrec.distributed.embeddingbag import EmbeddingBagSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dlrm_sharded import ShardedPlanner, Topology, plan_model
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError, InvalidPlanError
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.torchrec_modules import LaidOut, table_configs
from tests.unit.drop_in.synthetic import (
    META,
    ROWS,
    SHARDERS,
    TOPOLOGY,
    all_rows,
    bags,
    columns,
    host_rows,
    managed_bags,
    managed_sequences,
    plan,
    replicas,
    sequences,
    some_rows,
    types,
)


@pytest.mark.parametrize("make", [managed_bags, managed_sequences])
@pytest.mark.parametrize("name", SHARDERS)
def test_managed_collisions_lie_in_row_blocks(name, make):
    """Beside other tables, which get the memory that the row blocks leave."""
    planned = plan(nn.ModuleDict({"managed": make(), "bags": bags()}), SHARDERS[name]())
    assert types(planned["managed"]) == {"row_wise"}
    assert planned["managed"]["managed0"].ranks == [0, 1, 2, 3]
    assert len(planned["bags"]) == len(ROWS)
    alone = plan(make(), SHARDERS[name](), Topology(1, 10**9, compute_device="cpu"))
    assert types(alone[""]) == {"row_wise"}


def test_row_blocks_take_their_memory_first():
    model = nn.ModuleDict({"managed": managed_bags(80_000), "bags": bags()})
    of_blocks = 20_000 * 64 * 4
    with pytest.raises(InfeasibleTaskError, match=f"takes {of_blocks:,} B of rank 0"):
        plan(model, GreedySharder("dim"), Topology(4, of_blocks, compute_device="cpu"))
    with pytest.raises(InfeasibleTaskError, match=r"'t0' needs 15,360,000 B"):
        plan(model, GreedySharder("dim"), Topology(4, of_blocks + 15 * 10**6))
    with pytest.raises(InfeasibleTaskError, match=r"'managed0' of module 'm' .* has 3 rows"):
        plan(nn.ModuleDict({"m": managed_bags(3)}), GreedySharder("dim"))


@pytest.mark.parametrize("name", SHARDERS)
def test_sequences_are_whole_or_in_row_blocks_on_all_ranks(name):
    """The memory is too small for whole tables alone, and there are two hosts."""
    tight = dataclasses.replace(TOPOLOGY, memory_bytes=9 * 10**6)
    if name == "dim":
        with pytest.raises(InfeasibleTaskError, match="'s0'"):
            plan(sequences(), SHARDERS[name](), tight)
        return
    module_plan = plan(sequences(), SHARDERS[name](), tight)[""]
    assert types(module_plan) - {"table_wise"} == {"row_wise"}


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (columns(32, 32), "'s0' .* in column shards on a cpu"),
        (host_rows, "'s0' .* in row blocks on the ranks of one host on a cpu"),
        (replicas, "'s0' .* in replicas on a cpu"),
    ],
    ids=["columns", "host_rows", "replicas"],
)
def test_what_sequences_do_not_train_is_refused(shards, message):
    with pytest.raises(InvalidPlanError, match=message):
        plan(sequences(), LaidOut(shards))
    if shards is not replicas:
        plan(bags(), LaidOut(shards))


@pytest.mark.parametrize("of_several", [False, True])
def test_towers_are_refused_and_their_collections_are_planned(of_several):
    tower: nn.Module = EmbeddingTower(bags(), nn.Identity())
    sharder: Any = EmbeddingTowerSharder()
    if of_several:
        tower, sharder = EmbeddingTowerCollection([tower]), EmbeddingTowerCollectionSharder()
    planner = ShardedPlanner(GreedySharder("dim"), topology=TOPOLOGY)
    name = type(sharder).__name__
    with pytest.raises(ConfigError, match=rf"^EmbeddingTower.* under {name}, .* leave that"):
        planner.plan(tower, [sharder])
    planned = planner.plan(tower, get_default_sharders())
    assert [*planned.plan] == ["towers.0.embedding" if of_several else "embedding"]


@pytest.mark.parametrize("name", [name for name in SHARDERS if name != "dim"])
def test_means_are_not_split_by_rows(name):
    """The memory is too small for whole tables alone."""
    tight = dataclasses.replace(TOPOLOGY, memory_bytes=9 * 10**6)
    module_plan = plan(bags(means=[0, 2]), SHARDERS[name](), tight)[""]
    for table in ("t0", "t2"):
        assert module_plan[table].sharding_type == "column_wise"


def test_row_blocks_of_means_beside_others_are_refused():
    message = "'t0' of EmbeddingBagCollection pools by the mean .* wrong mean for table 't1'"
    for means in ([0, 2], range(len(ROWS))):
        with pytest.raises(InvalidPlanError, match=message):
            plan(bags(means=means), LaidOut(some_rows))
        assert types(plan(bags(means=means), LaidOut(all_rows))[""]) == {"row_wise"}
    plan(bags(means=[1]), LaidOut(some_rows))
    with pytest.raises(InvalidPlanError, match=r"feature 'f', which is also pooled by the sum"):
        plan(bags(means=[0, 2], feature="f"), LaidOut(all_rows))
    plan(bags(means=range(len(ROWS)), feature="f"), LaidOut(all_rows))


ROW_WISE = ParameterConstraints(sharding_types=["row_wise"])


@pytest.mark.parametrize("name", SHARDERS)
@pytest.mark.parametrize("means", [[0, 1], [0]], ids=["all", "one"])
def test_row_blocks_of_means_are_those_of_the_whole_module(name, means, tmp_path):
    """As the constraints of all its tables ask for them; those of one table are refused."""
    model = EmbeddingBagCollection(
        tables=table_configs([4091, 1021], [16, 8], means=means), device=META
    )
    asked: dict[str, Any] = {"topology": TOPOLOGY, "cost_model": None}
    asked["constraints"] = {"t0": ROW_WISE, "t1": ROW_WISE}
    _, report = plan_model(model, SHARDERS[name](), output_dir=tmp_path, **asked)
    planned, again = plan_model(model, plan=tmp_path / "plan.json", **asked)
    assert types(planned.plan[""]) == {"row_wise"}
    assert again.plan == report.plan
    asked["constraints"] = {"t0": ROW_WISE}
    with pytest.raises(ConfigError, match=r"'t0' of .* only row_wise, .* constrain all tables"):
        plan_model(model, SHARDERS[name](), **asked)
    narrow = EmbeddingBagCollection(tables=table_configs([4091, 9], [4, 4], means=[0]), device=META)
    for memory_bytes, can_help in ((40_000, True), (20_000, False)):
        with pytest.raises(InfeasibleTaskError) as error:
            plan(narrow, SHARDERS[name](), Topology(2, memory_bytes, compute_device="cpu"))
        assert ("constrain all tables of its module" in str(error.value)) == can_help


@pytest.mark.parametrize("name", SHARDERS)
def test_a_bag_of_torch_has_no_column_shards(name):
    """TorchRec's lookup of an `nn.EmbeddingBag` fails with several of them."""
    model = nn.ModuleDict(
        {f"b{i}": nn.EmbeddingBag(rows, 64, mode="sum") for i, rows in enumerate(ROWS)}
    )
    tight = dataclasses.replace(TOPOLOGY, memory_bytes=16 * 10**6)
    planner = ShardedPlanner(SHARDERS[name](), topology=tight, global_batch_size=65_536)
    for module_plan in planner.plan(model, [EmbeddingBagSharder()]).plan.values():
        (parameter,) = module_plan.values()
        assert {shard.shard_sizes[1] for shard in parameter.sharding_spec.shards} == {64}
