"""Cached tables in TorchRec's form; whole plans there and back are in tests/distributed."""

import dataclasses

import pytest
import torch
from torchrec.distributed.embedding_sharding import group_tables
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardedEmbeddingTable
from torchrec.distributed.types import ParameterSharding
from torchrec.distributed.utils import add_params_from_parameter_sharding
from torchrec.modules.embedding_configs import DataType, PoolingType

from dlrm_sharded.model.torchrec_adapter import from_torchrec, in_aligned_order, to_torchrec
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import Topology

TABLES = tuple(Table(f"t{i}", 1000, 16, 1.0) for i in range(4))
TOPOLOGY = Topology(2, 10**9)
PLAN = ShardingPlan(
    2,
    (
        Shard("t0", 0, (0, 1000), (0, 16)),
        Shard("t1", 0, (0, 1000), (0, 16), load_factor=0.25),
        Shard("t2", 0, (0, 1000), (0, 8), load_factor=0.5),
        Shard("t2", 1, (0, 1000), (8, 16), load_factor=0.5),
        *(
            Shard("t3", rank, rows, (0, 16), load_factor=0.125)
            for rank, rows in enumerate(row_blocks(1000, 2))
        ),
    ),
)


def test_there_and_back():
    module_plan = to_torchrec(PLAN, TABLES, TOPOLOGY)
    kernels = [module_plan[table.name].compute_kernel for table in TABLES]
    assert kernels == ["fused"] + ["fused_uvm_caching"] * 3
    types = [module_plan[table.name].sharding_type for table in TABLES]
    assert types == ["column_wise"] * 3 + ["row_wise"]
    assert module_plan["t0"].cache_params is None
    assert module_plan["t2"].cache_params.load_factor == 0.5
    assert set(from_torchrec(module_plan, TABLES, 2)) == set(PLAN.shards)


def test_tables_of_long_powers_of_two_come_first():
    """No order is better than another beyond a GPU's cache line, nor between equal powers."""
    dims = [4, 96, 12, 32, 64, 8, 128, 36]
    tables = [Table(str(dim), 7, dim, 1.0) for dim in dims]
    tables.append(Table("64 in fp16", 7, 64, 1.0, precision="fp16"))
    tables.append(Table("8 in fp16", 7, 8, 1.0, precision="fp16"))
    assert [table.name for table in in_aligned_order(tables)] == [
        *("96", "32", "64", "128", "64 in fp16", "8", "4", "12", "36", "8 in fp16"),
    ]


@pytest.mark.parametrize("fetches_ahead", [False, True])
def test_caches_keep_the_rows_of_a_step_if_the_next_ones_are_fetched(fetches_ahead):
    """FBGEMM would otherwise put other rows in their place before the backward pass."""
    module_plan = to_torchrec(PLAN, TABLES, TOPOLOGY, fetches_ahead=fetches_ahead)
    (groups,) = group_tables(
        [[sharded_table(name, parameter) for name, parameter in module_plan.items()]]
    )
    kept = [group.fused_params.get("prefetch_pipeline", False) for group in groups]
    assert sorted(kept) == [False, *[fetches_ahead] * 3]


def sharded_table(name: str, parameter: ParameterSharding) -> ShardedEmbeddingTable:
    """A table of a rank, as TorchRec makes it of its sharding before it groups tables."""
    fused_params = add_params_from_parameter_sharding({"learning_rate": 0.1}, parameter)
    return ShardedEmbeddingTable(
        num_embeddings=1000,
        embedding_dim=16,
        name=name,
        data_type=DataType.FP32,
        pooling=PoolingType.SUM,
        local_rows=1000,
        local_cols=16,
        compute_kernel=EmbeddingComputeKernel(parameter.compute_kernel),
        fused_params=fused_params,
        has_feature_processor=False,
        is_weighted=False,
    )


def test_each_cached_table_has_a_cache_of_its_own():
    """One module for all would have the mean of the load factors."""
    module_plan = to_torchrec(PLAN, TABLES, TOPOLOGY)
    tables = [sharded_table(name, parameter) for name, parameter in module_plan.items()]
    tables.append(dataclasses.replace(tables[0], name="t4"))
    (groups,) = group_tables([tables])
    by_names = {
        tuple(table.name for table in group.embedding_tables): group.fused_params or {}
        for group in groups
    }
    assert set(by_names) == {("t0", "t4"), ("t1",), ("t2",), ("t3",)}
    for name, load_factor in PLAN.load_factors.items():
        params = by_names[(name,)]
        assert params["cache_load_factor"] == pytest.approx(load_factor)
        assert 0 <= int(params["cache_reserved_memory"]) < 2**24
    assert "cache_load_factor" not in by_names[("t0", "t4")]


def test_checkpoints_flush_what_has_no_cache():
    """`ModelState` flushes and resets every lookup; without a cache that does nothing."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    lookup = SplitTableBatchedEmbeddingBagsCodegen(
        [(10, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)], device=torch.device("cpu")
    )
    before = lookup.split_embedding_weights()[0].clone()
    lookup.flush()
    lookup.reset_cache_states()
    assert torch.equal(lookup.split_embedding_weights()[0], before)
