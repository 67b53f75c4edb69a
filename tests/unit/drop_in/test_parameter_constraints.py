"""TorchRec's `ParameterConstraints`: kept, or refused by the name of the field."""

from typing import Any

import pytest
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_sharded import ShardedPlanner, ShardingPlan, Topology
from dlrm_sharded.files.errors import ConfigError, InfeasibleTaskError
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.sharders.heuristics import GreedySharder
from tests.distributed.torchrec_modules import LaidOut
from tests.unit.drop_in.synthetic import META, SHARDERS, TOPOLOGY, bags, columns

KINDS = ["table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel"]


def planned(
    constraints: dict[str, ParameterConstraints],
    sharder: Any = None,
    *,
    model: nn.Module | None = None,
    topology: Topology = TOPOLOGY,
    **options: Any,
) -> tuple[Any, ShardedPlanner]:
    """Return the plan of the tables of `bags`, and its planner."""
    planner = ShardedPlanner(
        sharder or GreedySharder("size"),
        topology=topology,
        constraints=constraints,
        cost_model=None,
        **options,
    )
    return planner.plan(model or bags(), get_default_sharders()).plan[""], planner


def tables(planner: ShardedPlanner) -> dict[str, Table]:
    assert planner.report is not None
    return {table.name: table for table in planner.report.task.tables}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dim", "search"])
def test_pinned_kinds_are_kept(kind: str, name: str) -> None:
    own = {t: ParameterConstraints(sharding_types=[kind]) for t in ("t0", "t3")}
    plan, _ = planned(own, SHARDERS[name](), batch_size=16_384)
    assert [plan[t].sharding_type for t in own] == [kind] * 2
    assert plan["t1"].compute_kernel == "fused"
    if kind == "table_row_wise":
        assert {tuple(plan[t].ranks) for t in own} <= {(0, 1), (2, 3)}


def test_a_kind_that_is_not_allowed_is_not_chosen() -> None:
    """The largest table would be split by columns and not by rows."""
    tight = Topology(4, 8 * 10**6, local_world_size=2, compute_device="cpu")
    free, _ = planned({}, SHARDERS["search"](), topology=tight)
    assert free["t0"].sharding_type == "column_wise"
    own = {"t0": ParameterConstraints(sharding_types=["row_wise", "table_wise"])}
    plan, _ = planned(own, SHARDERS["search"](), topology=tight)
    assert plan["t0"].sharding_type == "row_wise"


@pytest.mark.parametrize(
    ("kernels", "kind"),
    [(["fused"], None), (["dense"], "data_parallel"), (["dense", "fused"], None)],
)
def test_kernels_are_kept(kernels: list[str], kind: str | None) -> None:
    plan, _ = planned({"t1": ParameterConstraints(compute_kernels=kernels)})
    assert plan["t1"].compute_kernel == kernels[-1]
    assert kind in (None, plan["t1"].sharding_type)


def test_column_shards_are_not_narrower_than_the_smallest_partition() -> None:
    """A plan with narrower ones is made again, with the table whole."""

    class Narrow(LaidOut):
        def shard(self, task: Any) -> ShardingPlan:
            narrow = LaidOut(columns(16, 48)).shard(task)
            whole = {t.name: t for t in task.tables if "columns" not in t.layouts}
            kept = [shard for shard in narrow.shards if shard.table not in whole]
            return ShardingPlan(4, (*kept, *(Shard.whole(t, 1) for t in whole.values())))

    sharder = Narrow(columns(16, 48))
    plan, _ = planned({"t0": ParameterConstraints(min_partition=32)}, sharder)
    assert (len(plan["t0"].ranks), len(plan["t2"].ranks)) == (1, 2)
    plan, _ = planned({"t0": ParameterConstraints(min_partition=16)}, sharder)
    assert len(plan["t0"].ranks) == 2


def shared() -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=60, embedding_dim=64, feature_names=["f", "g"]
    )
    return EmbeddingBagCollection(tables=[config], device=META)


def test_lookups_are_counted_as_torchrec_counts_them() -> None:
    """Ids are the sum over features of batch size, poolings and pooling factor."""
    own = ParameterConstraints(
        pooling_factors=[3.0, 5.0], num_poolings=[1.0, 2.0], batch_sizes=[100, 200]
    )
    _, planner = planned({"t": own}, model=shared(), batch_size=100)
    assert tables(planner)["t"].pooling_factor == 3 + 5 * 2 * 2
    assert tables(planner)["t"].num_features == 5
    _, planner = planned({"t": ParameterConstraints()}, model=shared(), batch_size=100)
    assert (tables(planner)["t"].pooling_factor, tables(planner)["t"].num_features) == (1.0, 2)
    _, planner = planned({"t": own}, model=shared(), pooling_factors={"t": [1.0, 6.0]})
    assert tables(planner)["t"].pooling_factor == 7.0


def test_fields_of_the_lookups_are_in_torchrecs_plan() -> None:
    own = ParameterConstraints(
        stochastic_rounding=False,
        bounds_check_mode=BoundsCheckMode.FATAL,
        output_dtype=DataType.FP16,
        enforce_hbm=True,
        is_weighted=False,
        device_group="cpu",
        feature_names=["f0"],
    )
    plan, _ = planned({"t0": own})
    assert plan["t0"].stochastic_rounding is False
    assert plan["t0"].bounds_check_mode == BoundsCheckMode.FATAL
    assert plan["t0"].output_dtype == DataType.FP16
    assert plan["t0"].enforce_hbm is True
    assert plan["t1"].bounds_check_mode is None


@pytest.mark.parametrize(
    "field",
    [
        {"cache_params": CacheParams(load_factor=0.1)},
        {"use_virtual_table": True},
        {"device_group": "cuda"},
        {"feature_names": ["f1"]},
        {"is_weighted": True},
        {"sharding_types": ["grid_shard"]},
        {"compute_kernels": ["fused_uvm_caching"]},
        {"num_poolings": [1.0, 2.0]},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_cannot_be_kept_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"'t0' of EmbeddingBagCollection.*{next(iter(field))}"):
        planned({"t0": ParameterConstraints(**field)})


def test_a_table_that_is_not_there_or_too_small_for_its_kind() -> None:
    with pytest.raises(ConfigError, match=r"constraints names \['tabel'\]"):
        planned({"tabel": ParameterConstraints()})
    with pytest.raises(ConfigError, match="2 features"):
        planned({}, model=shared(), pooling_factors={"t": [1.0, 2.0, 3.0]})
    own = {"t1": ParameterConstraints(sharding_types=["row_wise"])}
    many = Topology(64, 10**9, compute_device="cpu")
    with pytest.raises(InfeasibleTaskError, match=r"'t1' .*allow only row_wise"):
        planned(own, topology=many)
