"""`ShardedPlanner` plans only what each kind of module trains: rows, columns or whole tables."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from torchrec.distributed.embeddingbag import EmbeddingBagSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection

from dlrm_sharded import ShardedPlanner, Topology, plan_model
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError, InvalidPlanError
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.torchrec_modules import LaidOut, table_configs
from tests.unit.drop_in.made_up import (
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
    with pytest.raises(InfeasibleTaskError, match=f"take {of_blocks:,} B of rank 0"):
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
        (columns(32, 32), "'s0' .* is split by columns, which only pooled tables are"),
        (host_rows, "'s0' .* lies in row blocks on the ranks of one host, which TorchRec trains"),
        (replicas, "'s0' .* is replicated, and FBGEMM's lookup of replicas pools on cpu"),
    ],
    ids=["columns", "host_rows", "replicas"],
)
def test_what_sequences_do_not_train_is_refused(shards, message):
    with pytest.raises(InvalidPlanError, match=message):
        plan(sequences(), LaidOut(shards))
    if shards is not replicas:
        plan(bags(), LaidOut(shards))


def hashed(buckets: int) -> ManagedCollisionEmbeddingCollection:
    configs = table_configs([1200], [64], kind=EmbeddingConfig, name="hashed")
    inner = HashZchManagedCollisionModule(
        zch_size=1200, device=torch.device("cpu"), total_num_buckets=buckets, max_probe=4
    )
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=configs, device=META),
        ManagedCollisionCollection({"hashed0": inner}, configs),
    )


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
def test_rows_of_managed_collisions_stay_in_equal_buckets():
    gpus = Topology(4, 10**9)
    (parameter,) = plan(hashed(8), GreedySharder("dim"), gpus)[""].values()
    assert [shard.shard_sizes[0] for shard in parameter.sharding_spec.shards] == [300] * 4
    with pytest.raises(ConfigError, match=r"'hashed0' of Managed.* has 6 buckets, which 4 ranks"):
        plan(hashed(6), GreedySharder("dim"), gpus)
    with pytest.raises(ConfigError, match=r"'hashed0' of Managed.* for training on CUDA only"):
        plan(hashed(8), GreedySharder("dim"))


@pytest.mark.parametrize("of_several", [False, True])
def test_towers_are_refused_and_their_collections_are_planned(of_several):
    tower: nn.Module = EmbeddingTower(bags(), nn.Identity())
    sharder: Any = EmbeddingTowerSharder()
    if of_several:
        tower, sharder = EmbeddingTowerCollection([tower]), EmbeddingTowerCollectionSharder()
    planner = ShardedPlanner(GreedySharder("dim"), topology=TOPOLOGY)
    name = type(sharder).__name__
    with pytest.raises(ConfigError, match=rf"^table 't0' of EmbeddingTower.* leave {name} out"):
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
    message = "'t0' of EmbeddingBagCollection pools by the mean .* divide those of table 't1'"
    for means in ([0, 2], range(len(ROWS))):
        with pytest.raises(InvalidPlanError, match=message):
            plan(bags(means=means), LaidOut(some_rows))
        assert types(plan(bags(means=means), LaidOut(all_rows))[""]) == {"row_wise"}
    plan(bags(means=[1]), LaidOut(some_rows))
    with pytest.raises(InvalidPlanError, match=r"would not, where feature 'f' is looked up"):
        plan(bags(means=[0, 2], feature="f"), LaidOut(all_rows))
    plan(bags(means=range(len(ROWS)), feature="f"), LaidOut(all_rows))
    with pytest.raises(InvalidPlanError, match="cuts the name of feature 'f0@x' at the @"):
        plan(bags(means=range(len(ROWS)), feature="f{}@x"), LaidOut(all_rows))


ROW_WISE = ParameterConstraints(sharding_types=["row_wise"])
TIGHT = Topology(2, 1_100_000, compute_device="cpu")
"""Ranks on which tables of 100,000 and 20,000 rows of 4 columns fit in row blocks only."""


def two_bags(rows: list[int], dims: list[int], means: list[int]) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=table_configs(rows, dims, means=means), device=META)


@pytest.mark.parametrize("name", SHARDERS)
def test_row_blocks_of_means_are_those_of_the_whole_module(name, tmp_path):
    """As the constraint of one table asks for them, or as nothing else fits."""
    model = two_bags([4091, 1021], [16, 8], [0, 1])
    asked: dict[str, Any] = {
        "constraints": {"t1": ROW_WISE},
        "topology": TOPOLOGY,
        "cost_model": None,
    }
    _, report = plan_model(model, SHARDERS[name](), output_dir=tmp_path, **asked)
    planned, again = plan_model(model, plan=tmp_path / "plan.json", **asked)
    assert types(planned.plan[""]) == {"row_wise"}
    assert again.plan == report.plan
    model = two_bags([100_000, 20_000], [4], [0, 1])
    both = nn.ModuleDict({"tight": model, "few": two_bags([40, 20], [4], [0, 1])})
    assert types(plan(model, SHARDERS[name](), TIGHT)[""]) == {"row_wise"}
    found = plan(both, SHARDERS[name](), TIGHT)
    assert types(found["tight"]) == {"row_wise"}
    assert types(found["few"]) <= {"table_wise", "column_wise"}
    with pytest.raises(InfeasibleTaskError, match=r"^(?!.*by the sum)"):
        plan(model, SHARDERS[name](), dataclasses.replace(TIGHT, memory_bytes=900_000))


def test_row_blocks_of_means_beside_others_are_refused_by_name():
    beside = (
        "'t0' of EmbeddingBagCollection pools by the mean beside table 't1', which pools by the sum"
    )
    mixed = two_bags([100_000, 20_000], [4], [0])
    with pytest.raises(ConfigError, match=f"constraints allow only row_wise, and table {beside}"):
        plan(mixed, GreedySharder("dim"), constraints={"t0": ROW_WISE})
    with pytest.raises(InfeasibleTaskError, match=beside):
        plan(mixed, GreedySharder("dim"), TIGHT)
    whole = ParameterConstraints(sharding_types=["table_wise"])
    message = "'t1' of .* may only be table_wise, and .* 't0' has to be in row blocks"
    with pytest.raises(ConfigError, match=message):
        plan(
            two_bags([90, 80], [4], [0, 1]),
            GreedySharder("dim"),
            constraints={"t0": ROW_WISE, "t1": whole},
        )


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
