"""A small model, its batches and plans of every kind, for jobs of a few ranks."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.model.dlrm import Dlrm, dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.model.sharded_model import shard_model, sharded_embeddings
from dlrm_sharded.plans.layouts import Replicas, row_blocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.precision import FP32_EXCHANGE, ExchangePrecision
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.pipeline import evaluate, make_pipeline

TABLES = (Table("a", 46, 16, 3.0), Table("b", 31, 8, 2.0), Table("c", 5, 8, 1.0))
PLANS = (
    "table_wise",
    "columns_uneven",
    "columns_on_one_rank",
    "empty_rank",
    "row_wise",
    "rows_and_columns",
    "replicas",
    "replicas_and_others",
)
"""Kinds of plans that suit every number of ranks."""

LOCAL_BATCH_SIZE = 6
NUM_STEPS = 3
LEARNING_RATE = 0.3
LEARNING_RATES = {"sgd": LEARNING_RATE, "rowwise_adagrad": LEARNING_RATE, "adam": 0.01}
CPU = torch.device("cpu")


def make_plan(kind: str, world_size: int) -> ShardingPlan:
    if kind == "host_rows":
        return make_host_rows_plan(world_size)
    last = world_size - 1
    replicated = Replicas(world_size)
    a, b, c = TABLES

    def columns(table: Table, *parts: tuple[int, int, int]) -> list[Shard]:
        rows = (0, table.num_embeddings)
        return [Shard(table.name, rank, rows, (start, stop)) for start, stop, rank in parts]

    def rows(table: Table) -> list[Shard]:
        blocks = row_blocks(table.num_embeddings, world_size)
        if len(blocks) < world_size:  # a block would be empty
            return [Shard.whole(table, last)]
        return [
            Shard(table.name, r, block, (0, table.embedding_dim)) for r, block in enumerate(blocks)
        ]

    whole = [Shard.whole(b, 0), Shard.whole(c, last)]
    uneven = [(0, 12, 0), (12, 16, last)]
    on_one_rank = [(0, 4, 0), (4, 12, last), (12, 16, 0)]
    if world_size == 1:  # all on one rank, where widths must be equal
        uneven, on_one_rank = [(0, 16, 0)], [(0, 8, 0), (8, 16, 0)]
    shards = {
        "table_wise": [Shard.whole(a, last), *whole],
        "columns_uneven": [*columns(a, *uneven), *whole],
        "columns_on_one_rank": [*columns(a, *on_one_rank), *whole],
        "empty_rank": [Shard.whole(table, 0) for table in TABLES],
        "row_wise": [*rows(a), *rows(b), *rows(c)],
        "rows_and_columns": [*rows(a), *columns(b, (0, 4, last), (4, 8, 0)), *rows(c)],
        "replicas": [shard for table in TABLES for shard in replicated.shards(table)],
        "replicas_and_others": [*rows(a), *replicated.shards(b), Shard.whole(c, last)],
    }[kind]
    return ShardingPlan(world_size, tuple(shards))


def global_batches(world_size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    size = LOCAL_BATCH_SIZE * world_size
    batches = []
    for _ in range(NUM_STEPS):
        lengths = torch.randint(0, 5, (len(TABLES), size), generator=generator)
        ids = [
            torch.randint(0, t.num_embeddings, (int(n.sum()),), generator=generator)
            for t, n in zip(TABLES, lengths, strict=True)
        ]
        batches.append(
            Batch(
                torch.rand(size, 3, generator=generator),
                KeyedJaggedTensor(
                    keys=[t.name for t in TABLES],
                    values=torch.cat(ids),
                    lengths=lengths.flatten().int(),
                ),
                torch.randint(0, 2, (size,), generator=generator).float(),
            )
        )
    return batches


def share(batch: Batch, rank: int) -> Batch:
    """Samples of one rank."""
    start = rank * LOCAL_BATCH_SIZE
    stop = start + LOCAL_BATCH_SIZE
    jagged = batch.sparse_features.to_dict()
    values, lengths = [], []
    for table in TABLES:
        offsets = jagged[table.name].offsets()
        values.append(jagged[table.name].values()[offsets[start] : offsets[stop]])
        lengths.append(jagged[table.name].lengths()[start:stop])
    return Batch(
        batch.dense_features[start:stop],
        KeyedJaggedTensor(
            keys=[t.name for t in TABLES], values=torch.cat(values), lengths=torch.cat(lengths)
        ),
        batch.labels[start:stop],
    )


def make_model(device: torch.device = CPU, *, compile_mode: str | None = None) -> Dlrm:
    """A model whose dense layers have the same weights on every device."""
    torch.manual_seed(0)
    layers: dict[str, Any] = {"dense_layers": [8, 8], "over_layers": [8, 1]}
    weights = dlrm(TABLES, 3, **layers, device=CPU).state_dict()
    model = dlrm(TABLES, 3, **layers, device=device, compile_mode=compile_mode)
    model.load_state_dict({n: w for n, w in weights.items() if not w.is_meta}, strict=False)
    return model


def optimizers(embedding: str) -> OptimizerConfig:
    return OptimizerConfig(
        embedding=embedding,
        embedding_learning_rate=LEARNING_RATES[embedding],
        dense="sgd",
        dense_learning_rate=0.1,
    )


def make_sharded(
    rank: Rank,
    kind: str,
    embedding: str,
    *,
    compile_mode: str | None = None,
    exchange_precision: ExchangePrecision = FP32_EXCHANGE,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model on the rank's device under a valid plan, and its optimizers."""
    topology = Topology(
        rank.world_size,
        10**9,
        local_world_size=rank.local_world_size,
        compute_device=rank.device.type,
    )
    plan = replace(make_plan(kind, rank.world_size), exchange_precision=exchange_precision)
    validate(plan, ShardingTask(TABLES, topology, LOCAL_BATCH_SIZE * rank.world_size))
    config = optimizers(embedding)
    model = make_model(rank.device, compile_mode=compile_mode)
    config.fuse_into(model)
    sharded = shard_model(model, plan, TABLES, topology, seed=7)
    return sharded, config.build(sharded)


def train_and_evaluate(
    rank: Rank, kind: str, shares: list[Batch], *, pipeline: str = "base", **options: Any
) -> list[float]:
    """Train a step, evaluate on all batches, and train the other steps; the losses.

    Args:
        shares: this rank's samples of each batch.
        options: of `make_sharded`.
    """
    sharded, optimizer = make_sharded(rank, kind, "sgd", **options)
    steps = make_pipeline(pipeline, sharded, optimizer, rank.device)
    batches = iter(shares)
    losses = [steps.progress(batches)[0]]
    evaluate(sharded, steps, shares, rank.device)
    losses += [steps.progress(batches)[0] for _ in shares[1:]]
    return [float(loss) for loss in losses]


def local_shards(sharded: torch.nn.Module) -> list[tuple[str, list[int], Tensor]]:
    """(table, offsets, weights) of this rank, on the CPU."""
    found = []
    for name, weight in sharded_embeddings(sharded).state_dict().items():
        pieces = [([0, 0], weight)]  # of a replica
        if isinstance(weight, ShardedTensor):
            pieces = [(s.metadata.shard_offsets, s.tensor) for s in weight.local_shards()]
        found += [
            (name.split(".")[-2], list(offsets), torch.empty_like(tensor, device=CPU).copy_(tensor))
            for offsets, tensor in pieces
        ]
    return found


def make_host_rows_plan(world_size: int) -> ShardingPlan:
    """Row blocks over the ranks of the second of two hosts, beside whole tables."""
    a, b, c = TABLES
    blocks = row_blocks(a.num_embeddings, world_size // 2)
    shards = [
        Shard(a.name, world_size // 2 + i, rows, (0, a.embedding_dim))
        for i, rows in enumerate(blocks)
    ]
    return ShardingPlan(world_size, (*shards, Shard.whole(b, 0), Shard.whole(c, 1)))
