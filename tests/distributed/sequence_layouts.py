"""Trains sequences under a layout, beside the unsharded model in fp64, on the ranks of a job."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded import ShardedPlanner, ShardingPlan, Topology
from dlrm_sharded.model.fused_optimizers import EMBEDDING_OPTIMIZERS
from dlrm_sharded.model.torchrec_adapter import parameter_sharding
from dlrm_sharded.plans.layouts import Replicas, RowBlocks, layout_of
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import ShardingTask
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.test_sharded_equals_unsharded import PlainUpdate
from tests.distributed.torchrec_modules import LaidOut, local_weights
from tests.preloaded.ranks import gathered

FEATURES = {"s0": ["f0"], "s1": ["f1", "f2"], "s2": ["f3"]}
KEYS = [feature for features in FEATURES.values() for feature in features]
ROWS = {"s0": 23, "s1": 10, "s2": 37}
DIM, BATCH_SIZE, NUM_STEPS, MAX_IDS = 16, 5, 3, 6
LEARNING_RATES = {"sgd": 0.1, "rowwise_adagrad": 0.1, "adam": 0.01, "dense_adam": 0.01}
EPSILON = 0.03
"""Large, as without it the updates of Adagrad and Adam would not show how gradients are scaled."""

LaysOut = Callable[[Table, int, int], list[Shard]]
"""Returns the shards of a table from it, its number and the number of ranks."""


def whole(table: Table, i: int, world_size: int) -> list[Shard]:
    return [Shard.whole(table, i % world_size)]


def on_the_last_rank(table: Table, i: int, world_size: int) -> list[Shard]:
    return [Shard.whole(table, world_size - 1)]


def rows(table: Table, i: int, world_size: int) -> list[Shard]:
    return RowBlocks(range(world_size)).shards(table)


def rows_and_whole(table: Table, i: int, world_size: int) -> list[Shard]:
    return (rows if i == 1 else whole)(table, i, world_size)


def replicas(table: Table, i: int, world_size: int) -> list[Shard]:
    return Replicas(world_size).shards(table)


def replicas_and_rows(table: Table, i: int, world_size: int) -> list[Shard]:
    return (replicas if i == 1 else rows)(table, i, world_size)


LAYOUTS: dict[str, tuple[LaysOut, list[str]]] = {
    "whole": (whole, ["table_wise"] * 3),
    "on_the_last_rank": (on_the_last_rank, ["table_wise"] * 3),
    "rows": (rows, ["row_wise"] * 3),
    "rows_and_whole": (rows_and_whole, ["table_wise", "row_wise", "table_wise"]),
}
"""Layouts of the three tables, with the types that TorchRec then gives them on several ranks."""

REPLICATED: dict[str, tuple[LaysOut, list[str]]] = {
    "replicas": (replicas, ["data_parallel"] * 3),
    "replicas_and_rows": (replicas_and_rows, ["row_wise", "data_parallel", "row_wise"]),
}
"""Layouts with replicas, whose dense lookup pools sequences on CPUs."""


def make_model() -> EmbeddingCollection:
    torch.manual_seed(0)
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name, num_embeddings=ROWS[name], embedding_dim=DIM, feature_names=features
            )
            for name, features in FEATURES.items()
        ],
        device=torch.device("cpu"),
    )


def batch(step: int, rank: int) -> KeyedJaggedTensor:
    """One feature has no ids on rank 0 in the second step, and none of them there in the third."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, MAX_IDS, (4, BATCH_SIZE), generator=generator)
    if rank == 0:
        lengths[: {1: 1, 2: 4}.get(step, 0)] = 0
    ids = [
        torch.randint(0, ROWS[table], (int(lengths[int(feature[1])].sum()),), generator=generator)
        for table, features in FEATURES.items()
        for feature in features
    ]
    return KeyedJaggedTensor(KEYS, torch.cat(ids), lengths=lengths.flatten().int())


def vectors_of(model: nn.Module, features: KeyedJaggedTensor) -> Tensor:
    """Return all vectors, one feature after the other."""
    found = model(features)
    return torch.cat([found[key].values() for key in KEYS]).cpu().double()


def loss_of(vectors: Tensor) -> Tensor:
    """Return a loss whose gradients differ by place, and grow with the weights."""
    factors = (torch.arange(vectors.numel()) % 7 - 3.0).view_as(vectors)
    return (vectors * factors).sum() + vectors.square().sum()


def train(rank: Rank, layout: str, rule: str) -> dict[str, Any]:
    """Train under a layout; return differences from the unsharded model, and where tables lie.

    Args:
        rule: one of `EMBEDDING_OPTIMIZERS`, fused, or "dense_adam", outside of a dense lookup.
    """
    alone, model = make_model().double(), make_model()
    before = {name: table.weight.detach().clone() for name, table in alone.embeddings.items()}
    if rule != "dense_adam":
        options = {"lr": LEARNING_RATES[rule]} | ({"eps": EPSILON} if rule != "sgd" else {})
        apply_optimizer_in_backward(EMBEDDING_OPTIMIZERS[rule], model.parameters(), options)
    plan, torchrec_plan = planned(rank, model, layout)
    if rule == "dense_adam":
        torchrec_plan = with_dense_lookups(torchrec_plan)
    sharders: list[Any] = [EmbeddingCollectionSharder()]
    sharded = DistributedModelParallel(
        model, plan=torchrec_plan, device=rank.device, sharders=sharders
    )
    for name, place, weight in local_weights(tables_of(sharded)):
        weight.copy_(before[name][place])
    optimizers = dense_adam([*sharded.parameters()], [*alone.parameters()], rule)
    updates = {
        shard: PlainUpdate(rule, learning_rate=LEARNING_RATES[rule], epsilon=EPSILON)
        for shard in plan.shards
        if not optimizers and (not shard.replicated or shard.rank == 0)
    }
    output_error = 0.0
    for step in range(NUM_STEPS):
        features = [batch(step, r) for r in range(rank.world_size)]
        vectors = [vectors_of(alone, of_rank) for of_rank in features]
        alone.zero_grad()
        (sum(map(loss_of, vectors), torch.zeros(())) / rank.world_size).backward()
        own = vectors_of(sharded, features[rank.rank].to(rank.device))
        output_error = max([output_error, *(own - vectors[rank.rank]).abs().flatten().tolist()])
        for optimizer in optimizers[:1]:
            optimizer.zero_grad()
        loss_of(own).backward()
        for optimizer in optimizers:
            optimizer.step()
        for shard, update in updates.items():
            _update(alone.embeddings[shard.table].weight, shard, update, features)
    after = {name: table.weight.detach() for name, table in alone.embeddings.items()}
    errors = [
        float((weight.cpu() - after[name][place]).abs().max())
        for name, place, weight in local_weights(tables_of(sharded))
    ]
    by_rank = gathered(rank, (max(errors, default=0.0), output_error, looked_up(sharded)))
    return {
        "error": max(error for error, _, _ in by_rank),
        "output_error": max(error for _, error, _ in by_rank),
        "least_change": min(float((after[t] - before[t]).abs().max()) for t in before),
        "looked_up": [found for _, _, found in by_rank],
        "types": [parameter.sharding_type for parameter in torchrec_plan.plan[""].values()],
    }


def planned(rank: Rank, model: nn.Module, layout: str) -> tuple[ShardingPlan, TorchRecPlan]:
    """Return a plan of ours and TorchRec's form of it, which `ShardedPlanner` makes.

    It makes no replicas of sequences, so those come from the adapter that runs use.
    """
    lays_out, _ = (LAYOUTS | REPLICATED)[layout]
    if layout in LAYOUTS:
        planner = ShardedPlanner(LaidOut(lays_out), cost_model=None)
        torchrec_plan = planner.collective_plan(model, [EmbeddingCollectionSharder()])
        assert planner.report is not None
        return planner.report.plan, torchrec_plan
    topology = Topology(rank.world_size, 10**9, compute_device=rank.device.type)
    tables = [Table(name, num_rows, DIM, 1.0, pooled=False) for name, num_rows in ROWS.items()]
    plan = LaidOut(lays_out).shard(ShardingTask(tuple(tables), topology, 1))
    shards = {table.name: plan.shards_by_table()[table.name] for table in tables}
    module_plan = EmbeddingModuleShardingPlan(
        {
            table.name: parameter_sharding(
                shards[table.name], layout_of(shards[table.name], table, topology), topology
            )
            for table in tables
        }
    )
    return plan, TorchRecPlan({"": module_plan})


def with_dense_lookups(plan: TorchRecPlan) -> TorchRecPlan:
    """Return the plan with lookups that leave the update of the weights to the optimizer."""
    return TorchRecPlan(
        {
            path: EmbeddingModuleShardingPlan(
                {
                    name: dataclasses.replace(parameter, compute_kernel="dense")
                    for name, parameter in module_plan.items()
                }
            )
            for path, module_plan in plan.plan.items()
        }
    )


def dense_adam(
    sharded: list[nn.Parameter], alone: list[nn.Parameter], rule: str
) -> list[torch.optim.Optimizer]:
    """Return the optimizers outside of the lookups; none if the lookups have theirs."""
    if rule != "dense_adam":
        return []
    options = {"lr": LEARNING_RATES[rule], "eps": EPSILON}
    # a rank may have no table
    return [torch.optim.Adam(weights, **options) for weights in (sharded, alone) if weights]


def tables_of(sharded: nn.Module) -> dict[str, Tensor]:
    return {path.split(".")[-2]: weight for path, weight in sharded.state_dict().items()}


def looked_up(sharded: DistributedModelParallel) -> list[tuple[Any, ...]]:
    """Return table, rows and columns of all weights in the lookups of this rank, sorted."""
    found = []
    for kernel in (m for lookup in sharded.module._lookups for m in lookup.modules()):
        if not isinstance(kernel, BaseBatchedEmbedding):
            continue
        tables = kernel.config.embedding_tables
        for table, weight in zip(tables, kernel.split_embedding_weights(), strict=True):
            metadata = table.local_metadata
            first_row, first_col = metadata.shard_offsets if metadata else (0, 0)
            num_rows, num_cols = weight.shape
            rows, cols = (first_row, first_row + num_rows), (first_col, first_col + num_cols)
            found.append((table.name, rows, cols))
    return sorted(found)


def _update(
    weight: nn.Parameter, shard: Shard, update: PlainUpdate, features: list[KeyedJaggedTensor]
) -> None:
    """Update the part of a table that a shard has, in plain torch."""
    ids = [of_rank[key].values() for of_rank in features for key in FEATURES[shard.table]]
    is_looked_up = torch.zeros(len(weight), dtype=torch.bool)
    is_looked_up[torch.cat(ids)] = True
    place = (slice(*shard.rows), slice(*shard.cols))
    assert weight.grad is not None
    with torch.no_grad():
        weight[place] -= update(weight.grad[place], is_looked_up[place[0]])
