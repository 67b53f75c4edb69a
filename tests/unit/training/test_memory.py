"""Estimates of memory: the parts of a rank, plans that do not fit, and the trace of the model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dlrm_sharded.files.errors import InfeasibleTaskError
from dlrm_sharded.model.dlrm import Dlrm, dlrm
from dlrm_sharded.plans.layouts import Replicas
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB, ShardingTask, Topology
from dlrm_sharded.training.dense_memory import DenseMemory, trace_dense
from dlrm_sharded.training.memory import (
    NCCL_BYTES,
    MemoryNeeds,
    estimate_host_memory,
    estimate_memory,
)
from dlrm_sharded.training.pipelines import PIPELINES
from dlrm_sharded.training.rank_memory import Budget, RankMemory

TABLES = (Table("a", 1000, 16, 10.0), Table("b", 4000, 8, 1.0))
MIB = 2**20
DENSE = DenseMemory(parameter_bytes=5000, buffer_bytes=300, activation_bytes=70_000)
NEEDS = MemoryNeeds(
    dense=DENSE,
    dense_state_bytes=5000,
    num_dense=13,
    num_measured_batches=4,
    num_eval_samples=100,
    cached_batch_bytes=12_345,
)


def task_of(world_size: int, batch_size: int = 64, device: str = "cpu") -> ShardingTask:
    topology = Topology(
        world_size, GIB, optimizer_bytes_per_row=4, compute_device=device, local_world_size=1
    )
    return ShardingTask(TABLES, topology, batch_size)


LAYERS: dict[str, Any] = {"dense_layers": [32, 8], "over_layers": [16, 1]}


def build(device: torch.device, **changes: Any) -> Dlrm:
    return dlrm(TABLES, 13, **LAYERS, device=device, **changes)


def with_layers(*layers: nn.Module) -> Callable[[torch.device], Dlrm]:
    """Builds the model with layers after its interaction."""

    def build_more(device: torch.device) -> Dlrm:
        model = build(device)
        model.inter_arch = nn.Sequential(model.inter_arch, *layers).to(device)
        return model

    return build_more


def traced(build_model: Callable[[torch.device], Dlrm], batch_size: int = 64) -> DenseMemory:
    return trace_dense(build_model, TABLES, num_dense=13, local_batch_size=batch_size)


def test_each_feature_of_a_table_has_a_vector():
    """Their trace is that of as many tables."""
    shared = Table("a", 1000, 16, 10.0, num_features=2, features=("seen", "bought"))
    found = [
        trace_dense(
            lambda device, of=tables: dlrm(of, 13, **LAYERS, device=device),
            tables,
            num_dense=13,
            local_batch_size=64,
        )
        for tables in ((shared, TABLES[1]), (TABLES[0], Table("c", 9, 16, 1.0), TABLES[1]))
    ]
    assert found[0] == found[1]


def test_what_lives_for_the_whole_run_is_exact():
    task = task_of(2)
    (first, second) = estimate_memory(ShardingPlan.from_ranks(task, [0, 1]), task, NEEDS, [7, 8])
    assert (first.table_weights, first.table_optimizer) == (4 * 1000 * 16, 4 * 1000)
    assert (second.table_weights, second.table_optimizer) == (4 * 4000 * 8, 4 * 4000)
    assert (first.process, second.process) == (7, 8)
    assert first.dense == 3 * 5000 + 300
    assert first.cached_batches == 12_345
    assert first.checkpoint_copy == 0
    assert first.needed == first.total - 7


def test_a_checkpoint_copies_the_model():
    """On a CPU the process holds the copy, of all but gradients."""
    task = task_of(1)
    copying = dataclasses.replace(NEEDS, checkpoint_copy=True)
    plan = ShardingPlan.from_ranks(task, [0, 0])
    (without,), (with_copy,) = (
        estimate_memory(plan, task, needs, [0]) for needs in (NEEDS, copying)
    )
    dense_bytes = 5000 + 300 + 5000
    tables = without.table_weights + without.table_optimizer
    assert with_copy.checkpoint_copy == tables + dense_bytes
    assert with_copy.total - without.total == with_copy.checkpoint_copy


def test_replicas_have_gradients_and_their_own_samples():
    """They exchange no vectors, and a checkpoint copies what they keep."""
    task = task_of(2)
    whole = ShardingPlan.from_ranks(task, [0, 0])
    replicated = ShardingPlan(2, tuple(s for t in TABLES for s in Replicas(2).shards(t)))
    copying = dataclasses.replace(NEEDS, checkpoint_copy=True)
    (alone, _), (first, second) = (
        estimate_memory(plan, task, copying, [0, 0]) for plan in (whole, replicated)
    )
    assert first == second
    for part in ("table_weights", "table_optimizer", "checkpoint_copy", "dense"):
        assert getattr(first, part) == getattr(alone, part), part
    num_weights = 1000 * 16 + 4000 * 8
    assert alone.replica_gradients == 0
    # as the lookup gives them, in DDP's bucket, and in that of the measurement
    assert first.replica_gradients == 3 * 4 * num_weights
    assert first.exchange == DENSE.parameter_bytes, "its buckets alone"
    assert first.ids < alone.ids


def test_row_blocks_share_the_ids_of_their_table():
    task = task_of(2)
    halves = [Shard("a", rank, (500 * rank, 500 * (rank + 1)), (0, 16)) for rank in range(2)]
    split = ShardingPlan(2, (*halves, Shard.whole(TABLES[1], 1)))
    whole = ShardingPlan.from_ranks(task, [0, 1])
    ids = [estimate_memory(plan, task, NEEDS, [0, 0])[0].ids for plan in (whole, split)]
    assert ids[1] < ids[0]


@pytest.mark.parametrize(
    ("world_size", "rank", "ids", "vectors", "exchange"),
    [
        # The update of the tables, which sorts the ids. Exchanges double what they move.
        (1, 0, 4 * 6912 + 8 * (704 + 128) + 40 * 704, 3 * 6144, 0),
        (2, 0, 4 * 3456 + 8 * (704 + 128) + 4 * 704 + 8 * 128 + 40 * 704, 2 * (6144 + 3072), 0),
        # The way of the gradients to other ranks, as this one has no table.
        (2, 1, 4 * 3456, 2 * 3072, 3072),
    ],
)
def test_what_the_measurement_needs_is_counted(world_size, rank, ids, vectors, exchange):
    """A batch of 64 has 704 ids and 128 lengths, 6144 bytes of vectors, 108 bytes a sample.

    On a GPU and under `base`, where it needs more than the training, its peak is the estimate's.
    """
    task = task_of(world_size, device="cuda")
    dense = dataclasses.replace(DENSE, activation_bytes=0)
    needs = dataclasses.replace(NEEDS, dense=dense, pipeline="base")
    memory = estimate_memory(ShardingPlan.from_ranks(task, [0, 0]), task, needs, [0, 0])[rank]
    buckets = DENSE.parameter_bytes if world_size > 1 else 0
    assert (memory.ids, memory.vectors, memory.exchange) == (ids, vectors, exchange + buckets)


def test_a_pipeline_holds_batches_of_later_steps():
    """A rank's share of a batch has 3456 bytes; 704 ids and 128 lengths of both ranks arrive."""
    task = task_of(2, device="cuda")
    plan, more = ShardingPlan.from_ranks(task, [0, 0]), {}
    for name in PIPELINES:
        needs = dataclasses.replace(NEEDS, pipeline=name, num_measured_batches=0)
        memory = estimate_memory(plan, task, needs, [0, 0])[0]
        more[name] = (memory.ids, memory.vectors, memory.exchange)
    arrived = 4 * 704 + 8 * 128
    assert tuple(np.subtract(more["sparse_dist"], more["base"])) == (3456 + arrived, 0, 0)


def test_a_gpu_and_its_host_have_budgets_of_their_own():
    """Copies and cached batches take host memory, and none of the GPU's."""
    task = task_of(1, device="cuda")
    plan = ShardingPlan(1, (Shard.whole(TABLES[0], 0), Shard("b", 0, (0, 4000), (0, 8))))
    copying = dataclasses.replace(NEEDS, checkpoint_copy=True)
    (without,), (with_copy,) = (
        estimate_memory(plan, task, needs, [0]) for needs in (NEEDS, copying)
    )
    assert without == with_copy
    assert (without.checkpoint_copy, without.cached_batches) == (0, 0)
    (host,) = estimate_host_memory(plan, task, copying)
    assert host.cached_batches == 2 * 12_345
    weights, states = (64_000, 128_000), (4000, 16_000)
    assert host.checkpoint_copy == sum(weights + states) + NEEDS.dense_bytes
    assert host.needed == host.cached_batches + host.checkpoint_copy


def test_without_a_whole_copy_one_block_at_a_time_is_copied():
    tables = (Table("a", 2**20, 64, 1.0),)
    task = dataclasses.replace(task_of(1, device="cuda"), tables=tables)
    (host,) = estimate_host_memory(ShardingPlan.from_ranks(task, [0]), task, NEEDS)
    assert host.checkpoint_copy == 64 * MIB


@pytest.mark.parametrize(("world_size", "nccl"), [(1, 0), (2, NCCL_BYTES)])
def test_a_gpu_needs_more_than_its_tensors(world_size, nccl):
    task = task_of(world_size, device="cuda")
    memory = estimate_memory(
        ShardingPlan.from_ranks(task, [0, 0]), task, NEEDS, [GIB] * world_size
    )[0]
    assert memory.nccl == nccl
    assert memory.slack > 0
    assert memory.tensors == memory.total - GIB - nccl - memory.slack


def test_a_plan_that_fits_is_accepted():
    memory = (RankMemory(process=GIB, table_weights=98), RankMemory(table_weights=2))
    Budget(ranks=memory, available_bytes=[100, 100], ranks_per_host=2).check()
    Budget(ranks=memory, available_bytes=[98, 2], ranks_per_host=1).check()


@pytest.mark.parametrize(
    ("available", "settings", "message"),
    [
        (4, {"ranks_per_host": 2}, r"rank 1 needs 3\.00 GiB .*2 ranks of its host need 5\.00 GiB"),
        (2, {"ranks_per_host": 1}, r"rank 1 needs 3\.00 GiB \(table shards 3\.00 GiB\).*2\.00 GiB"),
        (4, {"ranks_per_host": 2, "is_host": True}, r"of host memory .*checkpoint\.background=fal"),
    ],
    ids=["one_host", "two_hosts", "host_memory"],
)
def test_a_plan_that_does_not_fit(available, settings, message):
    memory = (RankMemory(table_weights=2 * GIB), RankMemory(process=GIB, table_weights=3 * GIB))
    budget = Budget(ranks=memory, available_bytes=[4 * GIB, available * GIB], **settings)
    with pytest.raises(InfeasibleTaskError, match=message):
        budget.check()


def test_parameters_and_buffers_are_those_of_the_model():
    model = build(torch.device("cpu"))
    dense = [p for name, p in model.named_parameters() if not name.startswith("sparse_arch")]
    memory = traced(build)
    assert memory.parameter_bytes == sum(p.nbytes for p in dense)
    assert memory.buffer_bytes == sum(buffer.nbytes for buffer in model.buffers())


def test_a_model_larger_than_the_host_is_traced():
    """A trace takes no memory for weights: these would take 4 TB."""
    meta = torch.device("meta")
    huge = with_layers(nn.Linear(11, 10**11, device=meta), nn.Linear(10**11, 11, device=meta))
    assert traced(huge).parameter_bytes > 4 * 10**12


def test_a_model_that_needs_data_counts_without_its_activations(caplog):
    class Branching(nn.Module):
        def forward(self, features: Tensor) -> Tensor:
            return features * 2 if features.sum() > 0 else features

    memory = traced(with_layers(Branching()))
    assert memory.activation_bytes == 0
    assert memory.parameter_bytes == traced(build).parameter_bytes
    assert "cannot run without data" in caplog.text


@pytest.mark.parametrize("options", [{"dense_graph": True}, {"compile_mode": "reduce-overhead"}])
def test_a_model_says_that_graphs_hold_its_activations(options):
    found = traced(functools.partial(build, **options))
    assert found == dataclasses.replace(traced(build), has_graphs=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_graphs_hold_activations_while_tables_are_updated(world_size):
    """Without a graph, activations and the vectors of an update need the same memory in turn."""
    task = task_of(world_size, device="cuda")

    def peak(**changes: Any) -> RankMemory:
        dense = dataclasses.replace(DENSE, **changes)
        needs = dataclasses.replace(NEEDS, dense=dense, num_measured_batches=0)
        return estimate_memory(ShardingPlan.from_ranks(task, [0, 0]), task, needs, [0, 0])[0]

    update, without, with_graph = peak(activation_bytes=0), peak(), peak(has_graphs=True)
    assert update.vectors < without.vectors == DENSE.activation_bytes
    inputs = 4 * (64 // world_size) * (13 + 1)
    assert with_graph.vectors == update.vectors + DENSE.activation_bytes + inputs
    exchange = with_graph.exchange - DENSE.parameter_bytes  # of the gradients, for DDP as well
    assert exchange == update.exchange - (DENSE.parameter_bytes if world_size > 1 else 0)
    assert with_graph.slack == int(0.25 * (with_graph.ids + with_graph.vectors + exchange))


def test_graphs_are_none_on_a_cpu():
    task = task_of(2)
    graphs = dataclasses.replace(DENSE, has_graphs=True)
    with_graphs = dataclasses.replace(NEEDS, dense=graphs)
    plan = ShardingPlan.from_ranks(task, [0, 0])
    found = [estimate_memory(plan, task, needs, [0, 0]) for needs in (NEEDS, with_graphs)]
    assert found[0] == found[1]
