"""A small model, and random plans of its tables of every layout."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.files.errors import InvalidPlanError
from dlrm_sharded.model.dlrm import dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.model.sharded_model import shard_model
from dlrm_sharded.plans.layouts import row_blocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.plans.tables import COLUMN_MULTIPLE, Table
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.trainer import make_pipeline

TABLES = (Table("a", 46, 16, 3.0), Table("b", 31, 32, 2.0), Table("c", 7, 8, 1.0))
LOCAL_BATCH_SIZE = 8
NUM_DENSE = 3
LEARNING_RATE = 0.1


@dataclass(frozen=True, slots=True)
class Sharded:
    """A model, its optimizers and its plan."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    plan: ShardingPlan


def random_plan(world_size: int, seed: int) -> ShardingPlan:
    """Return a valid plan: each table is whole, in columns, or in rows, on random ranks."""
    rng = random.Random(seed)
    while True:
        plan = ShardingPlan(
            world_size,
            tuple(shard for table in TABLES for shard in _shards(table, world_size, rng)),
        )
        try:
            validate(plan, ShardingTask(TABLES, topology(world_size), 6 * LOCAL_BATCH_SIZE))
        except InvalidPlanError:
            continue
        return plan


def topology(world_size: int) -> Topology:
    return Topology(world_size, 10**9, local_world_size=world_size, compute_device="cpu")


def layouts(plan: ShardingPlan) -> set[str]:
    """Return what a plan has: whole tables, columns, unequal ones, several on a rank, rows."""
    found = set()
    for shards in plan.shards_by_table().values():
        if len({shard.rows for shard in shards}) > 1:
            found.add("rows")
        elif len(shards) == 1:
            found.add("whole tables")
        else:
            found.add("columns")
            if len({shard.num_cols for shard in shards}) > 1:
                found.add("unequal columns")
            if len({shard.rank for shard in shards}) < len(shards):
                found.add("several columns on a rank")
    return found


def sharded(
    rank: Rank, plan: ShardingPlan, embedding: str, *, tables: Sequence[Table] = TABLES
) -> Sharded:
    """Return the model under a plan, with its initial weights."""
    torch.manual_seed(0)
    config = OptimizerConfig(
        embedding=embedding,
        embedding_learning_rate=LEARNING_RATE,
        dense="adagrad",
        dense_learning_rate=LEARNING_RATE,
    )
    model = dlrm(tables, NUM_DENSE, dense_layers=[8, 8], over_layers=[8, 1], device=rank.device)
    config.fuse_into(model)
    wrapped = shard_model(model, plan, tables, topology(rank.world_size), seed=7)
    return Sharded(wrapped, config.build(wrapped), plan)


def train(rank: Rank, trained: Sharded, *, num_steps: int = 2) -> None:
    """Train some steps, on batches that differ between ranks."""
    batches = [batch(TABLES, rank.rank + 100 * step) for step in range(num_steps)]
    steps = make_pipeline("base", trained.model, trained.optimizer, rank.device)
    stream = iter(batches)
    for _ in batches:
        steps.progress(stream)


def _shards(table: Table, world_size: int, rng: random.Random) -> list[Shard]:
    layout = rng.choice(("whole", "columns", "columns", "columns", "rows"))
    rows, dim = (0, table.num_embeddings), table.embedding_dim
    if layout == "rows" and world_size > 1:
        blocks = row_blocks(table.num_embeddings, world_size)
        return [Shard(table.name, rank, block, (0, dim)) for rank, block in enumerate(blocks)]
    if layout == "columns":
        places = range(COLUMN_MULTIPLE, dim, COLUMN_MULTIPLE)
        cuts = sorted(rng.sample(places, rng.randint(1, min(3, len(places)))))
        bounds = [0, *cuts, dim]
        return [
            Shard(table.name, rng.randrange(world_size), rows, columns)
            for columns in itertools.pairwise(bounds)
        ]
    return [Shard.whole(table, rng.randrange(world_size))]


def batch(tables: Sequence[Table], seed: int, *, size: int = LOCAL_BATCH_SIZE) -> Batch:
    """Return random samples."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(tables), size), generator=generator)
    ids = [
        torch.randint(0, table.num_embeddings, (int(n.sum()),), generator=generator)
        for table, n in zip(tables, lengths, strict=True)
    ]
    return Batch(
        torch.rand(size, NUM_DENSE, generator=generator),
        KeyedJaggedTensor(
            keys=[table.name for table in tables],
            values=torch.cat(ids),
            lengths=lengths.flatten().int(),
        ),
        torch.randint(0, 2, (size,), generator=generator).float(),
    )
