"""Measuring gives the stages of every rank and leaves the model as it was."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.cost.workload import workload_of_plan
from dlrm_sharded.measuring.bench import Bench
from dlrm_sharded.measuring.measure import MeasureConfig, measure
from dlrm_sharded.model.replicas import replica_part, replica_states, replicas_of
from dlrm_sharded.model.sharded_model import sharded_embeddings
from dlrm_sharded.model.torchrec_adapter import to_torchrec
from dlrm_sharded.plans.layouts import RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.plan_cost import STAGES
from dlrm_sharded.plans.tables import Table, tables_by_feature
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.small_model import NUM_STEPS, local_shards, make_sharded, shares
from tests.preloaded.ranks import gathered, run_ranks

ITERATIONS = 4


def measure_plan(rank: Rank) -> dict[str, Any]:
    """Row- and column-wise shards; ranks but the first have no column shard at all."""
    sharded, optimizer = make_sharded(rank, "rows_and_whole", "rowwise_adagrad")
    batches = shares(rank)
    # A step first, so that there is optimizer state to change.
    sharded(batches[0])[0].backward()
    optimizer.step()

    before = state_of(sharded)
    measured = measure(
        sharded_embeddings(sharded),
        [batch.sparse_features for batch in batches],
        MeasureConfig(iterations=ITERATIONS),
    )
    after = state_of(sharded)
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    return {
        "changed": gathered(rank, changed),
        "num_states": len(before),
        "per_rank": [cost.to_json() for cost in measured.cost.per_rank],
        "input_dist_ms": list(measured.cost.input_dist_ms),
        "spread": measured.spread,
        "iterations": measured.iterations,
        "launch_ms": dict(measured.launch_ms),
        "exposed": list(measured.exposed),
        "agree": len(set(gathered(rank, measured.cost))) == 1,
    }


def state_of(sharded: torch.nn.Module) -> dict[str, Tensor]:
    """Weights, row states and step counts of this rank."""
    states = {}
    for i, lookup in enumerate(sharded_embeddings(sharded)._lookups):
        for j, kernel in enumerate(lookup._emb_modules):
            fused = kernel._emb_module
            states[f"{i}/{j}/iter"] = fused.iter.clone()
            for name, buffer in [*fused.named_buffers(), *fused.named_parameters()]:
                states[f"{i}/{j}/{name}"] = buffer.detach().clone()
    return states


def measure_replicas(rank: Rank, kind: str, embedding: str) -> dict[str, Any]:
    """Measure before the first step, and again after it; train twice, once without measuring."""
    batches = shares(rank)
    reduced, trained, stages = [], [], []

    def counting(tensor: Tensor, *args: Any, group: Any = None) -> Any:
        reduced.append(tensor.numel())
        return all_reduce(tensor, *args, group=group)

    all_reduce = torch.distributed.all_reduce
    for measures in (True, False):
        sharded, optimizer = make_sharded(rank, kind, embedding)
        embeddings = sharded_embeddings(sharded)
        for batch in batches:
            if measures:
                torch.distributed.all_reduce = counting
                measured = measure(
                    embeddings,
                    [batch.sparse_features for batch in batches],
                    MeasureConfig(iterations=ITERATIONS, warmup=1),
                    replica_optimizer=replica_part(optimizer),
                )
                torch.distributed.all_reduce = all_reduce
                stages += [
                    value for cost in measured.cost.per_rank for value in cost.to_json().values()
                ]
            optimizer.zero_grad()
            sharded(batch)[0].backward()
            optimizer.step()
        [replicas] = replicas_of(embeddings)
        trained.append(
            [
                *(weight for _, _, weight in local_shards(sharded)),
                *(s for of in replica_states(optimizer, replicas).values() for s in of),
            ]
        )
    try:
        measure(embeddings, [batches[0].sparse_features], MeasureConfig(iterations=1))
    except ValueError as error:
        refused = str(error)
    return {
        "equal": [torch.equal(a, b) for a, b in zip(*trained, strict=True)],
        "num_weights": replicas.weights.numel(),
        "reduced": reduced,
        "positive": min(stages) > 0,
        "refused": refused,
    }


@pytest.mark.parametrize(
    ("kind", "embedding"),
    [
        pytest.param("replicas", "sgd", marks=pytest.mark.slow),
        ("replicas_and_others", "rowwise_adagrad"),
    ],
)
def test_measures_the_all_reduce_of_replicas(kind, embedding):
    """All of them take part once an iteration, and training goes on as if nothing was measured."""
    result = run_ranks(measure_replicas, 2, kind, embedding)
    assert all(result["equal"])
    assert len(result["equal"]) == 3
    replicated = [size for size in result["reduced"] if size > 1]  # others are times
    assert replicated == [result["num_weights"]] * (NUM_STEPS * (ITERATIONS + 1))
    assert result["positive"]
    assert "no optimizer" in result["refused"]


def test_measures_and_leaves_the_model_alone():
    result = run_ranks(measure_plan, 2)
    assert result["changed"] == [[], []]
    assert result["num_states"] > 4
    assert result["agree"]
    assert result["iterations"] == ITERATIONS
    assert len(result["per_rank"]) == len(result["input_dist_ms"]) == 2
    for cost in result["per_rank"]:
        assert set(cost) == {f"{stage}_ms" for stage in STAGES}
        assert all(ms > 0 for ms in cost.values())
    assert set(result["spread"]) == {"input_dist", *STAGES}
    assert result["launch_ms"] == {}


TWO = Topology(2, memory_bytes=10**9, compute_device="cpu")


def bench_of(rank: Rank, table_bytes: int) -> Bench:
    config = MeasureConfig(iterations=ITERATIONS, warmup=1)
    return Bench(config, rank.device, optimizer="rowwise_adagrad", table_bytes=table_bytes)


def ids_of(tables: Sequence[Table], num_samples: int, seed: int = 0) -> KeyedJaggedTensor:
    """Uniform ids, as many for each sample as the pooling factor says."""
    by_feature = tables_by_feature(tables)
    lengths = [int(table.pooling_factor / table.num_features) for table in by_feature.values()]
    generator = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(table.num_embeddings, (length * num_samples,), generator=generator)
        for table, length in zip(by_feature.values(), lengths, strict=True)
    ]
    of_samples = torch.tensor(lengths, dtype=torch.int32).repeat_interleave(num_samples)
    return KeyedJaggedTensor(list(by_feature), torch.cat(ids), lengths=of_samples)


def measure_big(rank: Rank) -> list[float]:
    """Rank 0 has all the work."""
    tables = (Table("big", 50_000, 128, 20.0), Table("tiny", 10, 4, 1.0))
    shards = (Shard.whole(table, rank) for rank, table in enumerate(tables))
    plan = ShardingPlan(2, tuple(shards))
    measured = bench_of(rank, 10**8).measure(
        tables, to_torchrec(plan, tables, TWO), [ids_of(tables, 8192)]
    )
    return [cost.fwd_compute_ms + cost.bwd_compute_ms for cost in measured.cost.per_rank]


def test_sees_who_works():
    """10,000 times the work on one rank shows, whatever else the machine does."""
    busy_ms, idle_ms = run_ranks(measure_big, 2)
    assert busy_ms > 3 * idle_ms


SEQUENCES = (
    Table("t0", 50, 8, 4.0, num_features=2, features=("seen", "bought")),
    Table("t1", 40, 16, 2.0, pooled=False, module="history"),
    Table("t2", 60, 16, 4.0, pooled=False, module="history"),
)
"""Bags of two features and two sequences, of which rank 0 has whole tables alone."""

SEQUENCES_PLAN = ShardingPlan(
    2,
    (
        *(Shard.whole(table, 0) for table in SEQUENCES[:2]),
        *RowBlocks(range(2)).shards(SEQUENCES[2]),
    ),
)
LOCAL_BATCH = 64


def measure_sequences(rank: Rank) -> dict[str, Any]:
    """Count what ranks send each other, [2], while bags and sequences are measured."""
    sent = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        given = inspect.signature(exchange).bind(*args, **kwargs).arguments
        if given["input"].is_floating_point():
            sent += given["input_split_sizes"][1 - rank.rank]
        return exchange(*args, **kwargs)

    exchange, torch.distributed.all_to_all_single = (torch.distributed.all_to_all_single, counting)
    plan = to_torchrec(SEQUENCES_PLAN, SEQUENCES, TWO)
    ids = ids_of(SEQUENCES, LOCAL_BATCH, rank.rank)
    measured = bench_of(rank, 10**5).measure(SEQUENCES, plan, [ids])
    torch.distributed.all_to_all_single = exchange
    task = ShardingTask(SEQUENCES, TWO, 2 * LOCAL_BATCH)
    costed = workload_of_plan(SEQUENCES_PLAN, task).exchange(for_ids=False)
    return {
        "sent_bytes": gathered(rank, 4 * sent / (2 * (ITERATIONS + 1))),
        "costed_bytes": costed.volume.tolist(),
        "stages": [list(cost.to_json().values()) for cost in measured.cost.per_rank],
    }


def test_measured_sequences_send_what_is_costed():
    """A vector for each id, forward and backward; row blocks send those of about half of them."""
    result = run_ranks(measure_sequences, 2)
    # what a rank sends forward comes back as gradients
    mean = sum(result["costed_bytes"]) / 2
    assert result["sent_bytes"] == pytest.approx([mean, mean], rel=0.1)
    assert min(min(stages) for stages in result["stages"]) > 0
