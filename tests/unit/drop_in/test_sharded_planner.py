"""`ShardedPlanner` plans only what the modules of a TorchRec model train."""

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from torchrec.distributed.embeddingbag import EmbeddingBagSharder
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection

from dlrm_sharded import ShardedPlanner, Topology
from dlrm_sharded.cost.learned import learned_cost_model
from dlrm_sharded.drop_in.find_tables import find_tables
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError, InvalidPlanError
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.plans.layouts import Replicas, RowBlocks, row_blocks
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.sharders.base import Sharder, SharderContext
from dlrm_sharded.sharders.baselines.halving import HalvingSharder
from dlrm_sharded.sharders.baselines.torchrec import TorchRecSharder
from dlrm_sharded.sharders.heuristics import GreedySharder
from dlrm_sharded.sharders.neuroshard import NeuroShardSharder
from tests.distributed.torchrec_modules import LaidOut, managed_collisions, table_configs

META = torch.device("meta")
ROWS = (60_000, 40, 30_000, 24, 20_000, 50)
TOPOLOGY = Topology(4, 10**9, local_world_size=2, compute_device="cpu")
MODEL = learned_cost_model(RunContext())
Plan = Mapping[str, ParameterSharding]

SHARDERS: dict[str, Callable[[], Sharder]] = {
    "dim": lambda: GreedySharder("dim"),
    "neuroshard": lambda: NeuroShardSharder(SharderContext(cost_model=MODEL), patience=1),
    "hugectr": lambda: HalvingSharder("hugectr", min_partition=4),
    "torchrec_dp": lambda: TorchRecSharder(full=True, replicate=True, min_partition=4),
}


def replicas(table: Table, i: int, world_size: int) -> list[Shard]:
    return Replicas(world_size).shards(table)


def columns(*widths: int) -> Callable[[Table, int, int], list[Shard]]:
    """Column shards of these widths, which the tables with even numbers have."""

    def shards(table: Table, i: int, world_size: int) -> list[Shard]:
        if i % 2:
            return [Shard.whole(table, 0)]
        stops = [sum(widths[: j + 1]) for j in range(len(widths))]
        return [
            dataclasses.replace(Shard.whole(table, rank), cols=(stop - width, stop))
            for rank, (width, stop) in enumerate(zip(widths, stops, strict=True))
        ]

    return shards


def host_rows(table: Table, i: int, world_size: int) -> list[Shard]:
    blocks = enumerate(row_blocks(table.num_embeddings, 2))
    return [Shard(table.name, rank, rows, (0, table.embedding_dim)) for rank, rows in blocks]


def all_rows(table: Table, i: int, world_size: int) -> list[Shard]:
    return RowBlocks(range(world_size)).shards(table)


def some_rows(table: Table, i: int, world_size: int) -> list[Shard]:
    return [Shard.whole(table, 0)] if i == 1 else all_rows(table, i, world_size)


def bags(
    data_type: DataType = DataType.FP32, *, means: Sequence[int] = (), feature: str = "f{}"
) -> EmbeddingBagCollection:
    configs = table_configs(ROWS, [64], means=means, feature=feature, data_type=data_type)
    return EmbeddingBagCollection(tables=configs, device=META)


def sequences() -> EmbeddingCollection:
    configs = table_configs(ROWS, [64], kind=EmbeddingConfig, name="s", feature="g{}")
    return EmbeddingCollection(tables=configs, device=META)


def managed_bags(rows: int = 1000) -> ManagedCollisionEmbeddingBagCollection:
    configs = table_configs([rows], [64], name="managed")
    bags = EmbeddingBagCollection(tables=configs, device=META)
    return ManagedCollisionEmbeddingBagCollection(bags, managed_collisions(configs, interval=1))


def managed_sequences() -> ManagedCollisionEmbeddingCollection:
    configs = table_configs([1000], [64], kind=EmbeddingConfig, name="managed")
    sequences = EmbeddingCollection(tables=configs, device=META)
    return ManagedCollisionEmbeddingCollection(sequences, managed_collisions(configs, interval=1))


def plan(
    model: nn.Module, sharder: Sharder, topology: Topology = TOPOLOGY, **options: Any
) -> dict[str, Plan]:
    options = {"cost_model": None, "global_batch_size": 65_536} | options
    planner = ShardedPlanner(sharder, topology=topology, **options)
    return dict(planner.plan(model, get_default_sharders()).plan)


def types(module_plan: Plan) -> set[str]:
    return {parameter.sharding_type for parameter in module_plan.values()}


def test_a_table_that_several_features_look_up_sends_a_vector_for_each():
    shared = EmbeddingBagConfig(
        name="t", num_embeddings=60, embedding_dim=64, feature_names=["f", "g", "h"]
    )
    seen = LaidOut(all_rows)
    planned = []
    seen.shard = lambda task: planned.append(task) or LaidOut(all_rows).shard(task)
    plan(EmbeddingBagCollection(tables=[shared], device=META), seen)
    assert [table.num_features for table in planned[0].tables] == [3]


def test_tables_know_their_module_and_whether_it_pools():
    found = find_tables(
        nn.ModuleDict({"bags": bags(), "deep": nn.ModuleDict({"sequences": sequences()})}),
        get_default_sharders(),
        TOPOLOGY,
    )
    kinds = [{(table.module, table.pooled) for table in m.tables.values()} for m in found]
    assert kinds == [{("bags", True)}, {("deep.sequences", False)}]


@pytest.mark.parametrize("name", SHARDERS)
def test_no_table_is_replicated_unless_asked(name):
    """`dim` has no replicas; the others have replicas of the small tables if they may."""
    asked = types(plan(bags(), SHARDERS[name](), replicas=True)[""])
    assert ("data_parallel" in asked) == (name != "dim")
    assert "data_parallel" not in types(plan(bags(), SHARDERS[name]())[""])


def test_the_report_says_what_replicas_would_gain(caplog):
    planner = ShardedPlanner(SHARDERS["neuroshard"](), topology=TOPOLOGY, global_batch_size=65_536)
    with caplog.at_level(logging.INFO):
        planner.plan(bags(), get_default_sharders())
    assert str(planner.report) in caplog.messages
    assert "another device" not in caplog.text
    said = re.search(
        r"^6 tables on 4 ranks, predicted critical path (.*) ms, cost (.*) ms \(prior\), at most "
        r"(.*) % above the best possible, (.*) ms; replicas",
        str(planner.report),
    )
    assert said is not None
    path_ms, cost_ms, gap, bound_ms = map(float, said.groups())
    assert 0 < bound_ms <= cost_ms
    assert cost_ms <= path_ms
    assert gap == pytest.approx(100 * (cost_ms / bound_ms - 1), abs=1.0)
    assert "replicas of 3 tables would save" in str(planner.report)
    assert "ShardedPlanner(replicas=True)" in str(planner.report)
    planner = ShardedPlanner(
        GreedySharder("dim"), topology=TOPOLOGY, replicas=True, cost_model=None
    )
    planner.plan(bags(), get_default_sharders())
    assert "0 of them replicated; without cost_model" in str(planner.report)


def test_one_table_on_one_rank_is_said_in_the_singular():
    planner = ShardedPlanner(GreedySharder("dim"), topology=Topology(1, 10**9), cost_model=None)
    config = EmbeddingBagConfig(name="t", num_embeddings=60, embedding_dim=64, feature_names=["f"])
    only = EmbeddingBagCollection(tables=[config], device=META)
    planner.plan(only, get_default_sharders())
    assert str(planner.report).startswith("1 table on 1 rank; ")


@pytest.mark.parametrize("by", ["sharder", "report"])
def test_prices_of_another_device_are_named(by, caplog):
    """They are those of GPUs, and the ranks are CPUs."""
    run = RunContext(device="cuda")
    prices = learned_cost_model(run)
    sharder = NeuroShardSharder(SharderContext(run, prices), patience=1)
    planner = ShardedPlanner(
        sharder if by == "sharder" else GreedySharder("dim"),
        topology=TOPOLOGY,
        cost_model=prices if by == "report" else None,
    )
    planner.plan(bags(), get_default_sharders())
    [warning] = [r.getMessage() for r in caplog.records if "another device" in r.getMessage()]
    assert "RunContext(device='cpu')" in warning
    assert ("(see the caveat)" in str(planner.report)) == (by == "report")
    assert "best possible" not in str(planner.report)


def test_replicas_that_nobody_asked_for_are_refused():
    with pytest.raises(InvalidPlanError, match=r"'t0' of EmbeddingBagCollection .*data_parallel"):
        plan(bags(), LaidOut(replicas))


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
    assert "row_wise" in types(module_plan) <= {"table_wise", "row_wise"}
    for parameter in module_plan.values():
        assert {shard.shard_sizes[1] for shard in parameter.sharding_spec.shards} == {64}


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (columns(16, 48), "shard of 48 columns, and table 's0' one of 16"),
        (columns(16, 16, 32), "shard of 32 columns, and table 's0' one of 16"),
        (host_rows, "'s0' .* lies in row blocks on the ranks of one host, which TorchRec trains"),
        (replicas, "'s0' .* is replicated, and FBGEMM's lookup of replicas pools on cpu"),
    ],
    ids=["unequal", "unequal_to_others", "host_rows", "replicas"],
)
def test_what_sequences_do_not_train_is_refused(shards, message):
    with pytest.raises(InvalidPlanError, match=message):
        plan(sequences(), LaidOut(shards))
    plan(bags(), LaidOut(shards), replicas=shards is replicas)


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


@pytest.mark.parametrize("name", SHARDERS)
def test_half_tables_count_as_such(name):
    """All tables fit one rank of two in fp16, and not in fp32."""
    size = sum(ROWS) * 64 * 2
    topology = Topology(2, size // 2 + 10**6, compute_device="cpu")
    assert len(plan(bags(DataType.FP16), SHARDERS[name](), topology)[""]) == len(ROWS)
    with pytest.raises(InfeasibleTaskError):
        plan(bags(), SHARDERS[name](), topology)


@pytest.mark.parametrize("name", SHARDERS)
def test_half_tables_have_no_replicas(name):
    """The lookup that trains replicas has fp32 only."""
    planned = plan(bags(DataType.FP16), SHARDERS[name](), replicas=True)
    assert "data_parallel" not in types(planned[""])


def test_precisions_that_a_plan_does_not_know(caplog):
    with pytest.raises(ConfigError, match=r"'t0' of EmbeddingBagCollection has weights in int8"):
        plan(bags(DataType.INT8), GreedySharder("dim"))
    context = SharderContext(cost_model=MODEL)
    with pytest.raises(InvalidPlanError, match="planned in fp16, and the model has it in fp32"):
        plan(bags(), NeuroShardSharder(context, table_precision="fp16", patience=1))
    plan(bags(), NeuroShardSharder(context, exchange_precision="fp16", patience=1))
    assert "exchanges in fp16" in caplog.text


@pytest.mark.parametrize("shares", ["module", "weight"])
def test_tables_that_two_places_share_are_refused(shares):
    """TorchRec would train them apart, and leave a module unsharded where it is found again."""
    one = other = bags()
    if shares == "weight":
        other = bags()
        other.embedding_bags["t0"].weight = one.embedding_bags["t0"].weight
    with pytest.raises(ConfigError, match=r"'t0' of module 'b' .* is also one of module 'a'"):
        plan(nn.ModuleDict({"a": one, "b": other}), GreedySharder("dim"))


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


class Interaction(nn.Module):
    """The dense part of a tower."""


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


def test_tables_that_should_not_train_are_named(caplog):
    """TorchRec's fused lookups have no regard for it."""
    model = bags()
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    plan(model, GreedySharder("dim"), Topology(2, 2**30, compute_device="cpu"))
    [warning] = [message for message in caplog.messages if "requires_grad=False" in message]
    assert "a learning rate of 0 keeps their weights" in warning
