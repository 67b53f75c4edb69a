"""A small model, its batches and plans of every kind, for jobs of a few ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.model.dlrm import Dlrm, dlrm
from dlrm_sharded.model.optimizers import OptimizerConfig
from dlrm_sharded.model.sharded_model import shard_model, sharded_embeddings
from dlrm_sharded.model.torchrec_adapter import table_name
from dlrm_sharded.plans.layouts import Replicas, RowBlocks
from dlrm_sharded.plans.plan import Shard, ShardingPlan, with_precisions
from dlrm_sharded.plans.tables import Table, tables_by_feature
from dlrm_sharded.plans.task import ShardingTask, Topology
from dlrm_sharded.plans.validation import validate
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.pipeline import CLASSES, evaluate
from dlrm_sharded.training.trainer import Trainer, TrainerConfig
from dlrm_sharded.training.training_result import TrainingResult
from tests.distributed.torchrec_modules import local_weights
from tests.preloaded.ranks import gathered
from tests.unit.synthetic import column_shards

A, B, C = "user.id", "ö. /a b,c=2", "type"
"""Names that torch refuses for modules, or that are unlike words: what users see are these."""

TABLES = (Table(A, 46, 16, 3.0), Table(B, 31, 8, 2.0), Table(C, 5, 8, 1.0))
SHARING = (replace(TABLES[0], num_features=2, features=("seen.id", "bought id")), *TABLES[1:])
"""The tables, one of which two features look up."""

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
"""Kinds of plans that suit every number of ranks; `host_rows` is for two hosts."""

LOCAL_BATCH_SIZE = 6
NUM_STEPS = 3
LEARNING_RATE = 0.3
LEARNING_RATES = {
    "sgd": LEARNING_RATE,
    "rowwise_adagrad": LEARNING_RATE,
    "elementwise_adagrad": 0.01,
    "adam": 0.01,
}
CPU = torch.device("cpu")


def make_plan(kind: str, world_size: int, fp16: Sequence[str] = ()) -> ShardingPlan:
    """A plan of a kind, with the named tables in fp16."""
    last, half = world_size - 1, world_size // 2
    replicated = Replicas(world_size)
    a, b, c = TABLES

    def rows(table: Table, first: int = 0) -> list[Shard]:
        """Row blocks on all ranks from the first one."""
        blocks = RowBlocks(range(first, world_size))
        if first == last or not blocks.is_possible(table):  # a block would be empty
            return [Shard.whole(table, last)]
        return blocks.shards(table)

    whole = [Shard.whole(b, 0), Shard.whole(c, last)]
    uneven, on_one_rank = [(0, 12), (last, 4)], [(0, 4), (last, 8), (0, 4)]
    if world_size == 1:  # all on one rank, where widths must be equal
        uneven, on_one_rank = [(0, 16)], [(0, 8), (0, 8)]
    shards = {
        "table_wise": [Shard.whole(a, last), *whole],
        "columns_uneven": [*column_shards(a, *uneven), *whole],
        "columns_on_one_rank": [*column_shards(a, *on_one_rank), *whole],
        "empty_rank": [Shard.whole(table, 0) for table in TABLES],
        "row_wise": [*rows(a), *rows(b), *rows(c)],
        "rows_and_columns": [*rows(a), *column_shards(b, (last, 4), (0, 4)), *rows(c)],
        "replicas": [shard for table in TABLES for shard in replicated.shards(table)],
        "replicas_and_others": [*rows(a), *replicated.shards(b), Shard.whole(c, last)],
        "host_rows": [*rows(a, half), Shard.whole(b, 0), Shard.whole(c, min(1, last))],
        "rows_and_whole": [*rows(a), Shard.whole(b, 0), Shard.whole(c, 0)],
    }[kind]
    precise = (replace(s, precision="fp16") if s.table in fp16 else s for s in shards)
    return ShardingPlan(world_size, tuple(precise))


def tables_of(plan: ShardingPlan, tables: tuple[Table, ...] = TABLES) -> tuple[Table, ...]:
    """The tables in the precisions of a plan."""
    task = ShardingTask(tables, Topology(plan.world_size, 10**9), LOCAL_BATCH_SIZE)
    return with_precisions(task, plan).tables


def global_batches(world_size: int, tables: Sequence[Table] = TABLES) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [batch_of(LOCAL_BATCH_SIZE * world_size, generator, tables) for _ in range(NUM_STEPS)]


def batch_of(size: int, generator: torch.Generator, tables: Sequence[Table] = TABLES) -> Batch:
    by_feature = tables_by_feature(tables)
    lengths = torch.randint(0, 5, (len(by_feature), size), generator=generator)
    ids = [
        torch.randint(0, t.num_embeddings, (int(n.sum()),), generator=generator)
        for t, n in zip(by_feature.values(), lengths, strict=True)
    ]
    names = list(by_feature)
    return Batch(
        torch.rand(size, 3, generator=generator),
        KeyedJaggedTensor(names, torch.cat(ids), lengths=lengths.flatten().int()),
        torch.randint(0, 2, (size,), generator=generator).float(),
    )


def shares(rank: Rank, tables: Sequence[Table] = TABLES) -> list[Batch]:
    """The samples of a rank, of each batch, on its device."""
    batches = global_batches(rank.world_size, tables)
    return [share(batch, rank.rank).to(rank.device) for batch in batches]


def share(batch: Batch, rank: int) -> Batch:
    """Samples of one rank."""
    start = rank * LOCAL_BATCH_SIZE
    stop = start + LOCAL_BATCH_SIZE
    names = batch.sparse_features.keys()
    jagged = [batch.sparse_features[name] for name in names]
    offsets = [ids.offsets() for ids in jagged]
    values = [i.values()[o[start] : o[stop]] for i, o in zip(jagged, offsets, strict=True)]
    lengths = [ids.lengths()[start:stop] for ids in jagged]
    return Batch(
        batch.dense_features[start:stop],
        KeyedJaggedTensor(names, torch.cat(values), lengths=torch.cat(lengths)),
        batch.labels[start:stop],
    )


def make_model(
    device: torch.device = CPU, tables: Sequence[Table] = TABLES, **options: Any
) -> Dlrm:
    """A model with these options, whose dense layers have the same weights on every device."""
    torch.manual_seed(0)
    layers: dict[str, Any] = {"dense_layers": [8, 8], "over_layers": [8, 1]}
    weights = dlrm(tables, 3, **layers, device=CPU).state_dict()
    model = dlrm(tables, 3, **layers, device=device, **options)
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
    half: Sequence[str] = (),
    compile_mode: str | None = "none",
    dense_graph: bool | None = False,
    ids_per_sample: Mapping[str, int] | None = None,
    tables: tuple[Table, ...] = TABLES,
    **changes: Any,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model on the rank's device under a plan with these changes, and its optimizers."""
    plan = replace(make_plan(kind, rank.world_size, half), **changes)
    tables, options = (
        tables_of(plan, tables),
        {"compile_mode": compile_mode, "dense_graph": dense_graph},
    )
    model = make_model(rank.device, tables, **options)
    return shard(rank, model, plan, optimizers(embedding), tables, ids_per_sample)


def shard(
    rank: Rank,
    model: Dlrm,
    plan: ShardingPlan,
    config: OptimizerConfig,
    tables: Sequence[Table] = TABLES,
    ids_per_sample: Mapping[str, int] | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """A model under a valid plan, and its optimizers."""
    topology = Topology(
        rank.world_size,
        10**9,
        local_world_size=rank.local_world_size,
        compute_device=rank.device.type,
    )
    validate(plan, ShardingTask(tuple(tables), topology, LOCAL_BATCH_SIZE * rank.world_size))
    config.fuse_into(model)
    sharded = shard_model(model, plan, tables, topology, seed=7, ids_per_sample=ids_per_sample)
    return sharded, config.build(sharded)


def trained_logits(
    rank: Rank, sharded: Any, optimizer: CombinedOptimizer, tables: Sequence[Table] = TABLES
) -> Tensor:
    """Train on all batches; return the logits of all steps and ranks."""
    logits = []
    for batch in shares(rank, tables):
        optimizer.zero_grad()
        loss, (_, step_logits, _) = sharded(batch)
        loss.backward()
        optimizer.step()
        logits.append(step_logits.detach().cpu())
    return torch.cat(gathered(rank, torch.stack(logits)), dim=1)


def train_and_evaluate(
    rank: Rank, kind: str, shares: list[Batch], *, pipeline: str = "base", **options: Any
) -> list[float]:
    """Train a step, evaluate on all batches, and train the other steps; the losses.

    Args:
        shares: this rank's samples of each batch.
        options: of `make_sharded`.
    """
    sharded, optimizer = make_sharded(rank, kind, "sgd", **options)
    steps = CLASSES[pipeline](sharded, optimizer, rank.device)
    batches = iter(shares)
    losses = [steps.progress(batches)[0]]
    evaluate(sharded, steps, shares, rank.device)
    losses += [steps.progress(batches)[0] for _ in shares[1:]]
    return [float(loss) for loss in losses]


def run_trainer(
    rank: Rank, sharded: Any, optimizer: CombinedOptimizer, config: TrainerConfig, **parts: Any
) -> TrainingResult:
    """Train as runs do; what is not given is a synthetic dataset, constant rates and no log."""
    sizes = {"batch_size": LOCAL_BATCH_SIZE * rank.world_size, "num_dense": 3}
    dataset = SyntheticDataset(TABLES, **sizes, num_train_batches=3, num_val_batches=1)
    place = {"rank": rank.rank, "world_size": rank.world_size}
    defaults = {
        "lr_scheduler": LambdaLR(optimizer, lambda step: 1.0),
        "train_stream": BatchStream(dataset, "train", **place),
        "eval_stream": BatchStream(dataset, "val", **place),
        "log_scalar": lambda *_: None,
    }
    return Trainer(
        sharded,
        optimizer=optimizer,
        config=config,
        batch_size=dataset.batch_size,
        rank=rank,
        **defaults | parts,
    ).run()


Place = tuple[slice, slice]


def local_shards(sharded: torch.nn.Module) -> list[tuple[str, Place, Tensor]]:
    """(table, place in it, weights) of this rank, on the CPU."""
    found = []
    for name, place, weight in local_weights(sharded_embeddings(sharded).state_dict()):
        on_cpu = torch.empty_like(weight, device=CPU).copy_(weight)
        found.append((table_name(name.split(".")[-2]), place, on_cpu))
    return found


def all_shards(rank: Rank, sharded: torch.nn.Module) -> list[tuple[str, Place, Tensor]]:
    """Those of all ranks."""
    return [shard for shards in gathered(rank, local_shards(sharded)) for shard in shards]
