"""A sharded model trains like the same model on one device, under every kind of plan."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_sharded.model.sharded_model import fill_table, sharded_embeddings
from dlrm_sharded.model.torchrec_adapter import bag_configs, table_name
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.small_model import (
    CPU,
    LEARNING_RATES,
    PLANS,
    SHARING,
    TABLES,
    all_shards,
    global_batches,
    make_model,
    make_plan,
    make_sharded,
    trained_logits,
)
from tests.preloaded.ranks import run_ranks

WORLD_SIZES = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]

EPSILON = 1e-8
"""FBGEMM's default, of both kinds of Adagrad and of Adam."""

ON_CPUS = ("sgd", "rowwise_adagrad", "elementwise_adagrad")


def train_sharded(
    rank: Rank, cases: list[tuple[str, str]], tables: tuple[Table, ...] = TABLES
) -> dict[str, Any]:
    """Train under each (plan, embedding optimizer); what came out, of all ranks."""
    results: dict[str, Any] = {}
    for kind, embedding in cases:
        sharded, optimizer = make_sharded(rank, kind, embedding, tables=tables)
        results[f"{kind}-{embedding}"] = {
            "initial": initial_tables(rank.device),
            "logits": trained_logits(rank, sharded, optimizer, tables),
            "shards": all_shards(rank, sharded),
            "dense": [
                p.detach().cpu() for name, p in sharded.named_parameters() if "dense_arch" in name
            ],
            "fused_modules": [
                len(lookup._emb_modules)
                for lookup in sharded_embeddings(sharded)._lookups
                if isinstance(lookup, GroupedPooledEmbeddingsLookup)
            ],
        }
    return results


def initial_tables(device: torch.device) -> dict[str, Tensor]:
    """The weights that seed 7 gives, whole; a GPU draws others than a CPU."""
    tables = {t.name: torch.empty(t.num_embeddings, t.embedding_dim, device=device) for t in TABLES}
    for name, weight in tables.items():
        fill_table(weight, [0, 0], len(weight), name, seed=7)
    return {name: weight.cpu() for name, weight in tables.items()}


def train_unsharded(
    kind: str,
    embedding: str,
    world_size: int,
    initial: dict[str, Tensor],
    tables: tuple[Table, ...] = TABLES,
) -> dict[str, Any]:
    """The same training on one CPU, the tables updated shard by shard in plain torch.

    Weights, gradients and states are in fp64. Pooled vectors and logits pass through fp32.

    Args:
        initial: weights of the tables.
    """
    model = make_model(tables=tables).double()
    collection = EmbeddingBagCollection(tables=bag_configs(tables), device=CPU).double()
    bags = collection.embedding_bags.items()
    weights = {table_name(name): bag.weight for name, bag in bags}
    for name, values in initial.items():
        weights[name].data.copy_(values)
    model.sparse_arch.embedding_bag_collection = collection
    dense = [p for n, p in model.named_parameters() if "embedding_bag" not in n]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    shards = make_plan(kind, world_size).shards
    shards = tuple(s for s in shards if not s.replicated or s.rank == 0)  # replicas are one table
    updates = {shard: PlainUpdate(embedding) for shard in shards}
    logits = []
    names = {table.name: table.feature_names for table in tables}
    for batch in global_batches(world_size, tables):
        model.zero_grad()
        batch.dense_features = batch.dense_features.double()
        loss, (_, step_logits, _) = model(batch)
        loss.backward()
        optimizer.step()
        for shard, update in updates.items():
            place = (slice(*shard.rows), slice(*shard.cols))
            looked_up = torch.zeros(weights[shard.table].shape[0], dtype=torch.bool)
            for name in names[shard.table]:
                looked_up[batch.sparse_features[name].values()] = True
            weights[shard.table].data[place] -= update(
                weights[shard.table].grad[place], looked_up[place[0]]
            )
        logits.append(step_logits)
    return {
        "logits": torch.stack(logits),
        "tables": {name: weight.detach() for name, weight in weights.items()},
        "dense": [p.detach() for p in model.dense_arch.parameters()],
    }


class PlainUpdate:
    """Compute in plain torch what FBGEMM's optimizers subtract from a shard."""

    def __init__(
        self, embedding: str, *, learning_rate: float | None = None, epsilon: float = EPSILON
    ) -> None:
        self._embedding = embedding
        self._learning_rate = learning_rate or LEARNING_RATES[embedding]
        self._epsilon = epsilon
        self._num_steps = 0
        self._states: dict[str, Tensor] = {}

    def __call__(self, gradient: Tensor, looked_up: Tensor) -> Tensor:
        """Return the change [rows, cols].

        Args:
            gradient: [rows, cols]
            looked_up: [rows], whether a row is in the batch; the states of others stay.
        """
        self._num_steps += 1
        direction = getattr(self, f"_{self._embedding}")(gradient, looked_up)
        return self._learning_rate * direction * looked_up[:, None]

    def _sgd(self, gradient: Tensor, looked_up: Tensor) -> Tensor:
        return gradient

    def _rowwise_adagrad(self, gradient: Tensor, looked_up: Tensor) -> Tensor:
        # One number per row of a shard: the mean over the shard's columns only.
        state = self._states.setdefault("sum", torch.zeros_like(gradient[:, 0]))
        state += gradient.square().mean(dim=1)
        return gradient / (state.sqrt() + self._epsilon)[:, None]

    def _elementwise_adagrad(self, gradient: Tensor, looked_up: Tensor) -> Tensor:
        state = self._states.setdefault("sum", torch.zeros_like(gradient))
        state += gradient.square()
        return gradient / (state.sqrt() + self._epsilon)

    def _adam(self, gradient: Tensor, looked_up: Tensor) -> Tensor:
        corrected = []
        for power, decay in enumerate((0.9, 0.999), start=1):
            moment = self._states.setdefault(f"moment {power}", torch.zeros_like(gradient))
            moment[looked_up] = (decay * moment + (1 - decay) * gradient**power)[looked_up]
            corrected.append(moment / (1 - decay**self._num_steps))
        return corrected[0] / (corrected[1].sqrt() + self._epsilon)


@functools.cache
def sharded_results(world_size: int, tables: tuple[Table, ...] = TABLES) -> dict[str, Any]:
    """All cases of one world size in one start of its processes."""
    cases = [(kind, embedding) for kind in PLANS for embedding in ON_CPUS]
    return run_ranks(train_sharded, world_size, cases, tables)


@pytest.mark.parametrize("embedding", ON_CPUS)
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_trains_alike(world_size, kind, embedding):
    sharded = sharded_results(world_size)[f"{kind}-{embedding}"]
    assert_alike(sharded, train_unsharded(kind, embedding, world_size, sharded["initial"]))


@pytest.mark.parametrize("embedding", ON_CPUS)
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_table_of_two_features_trains_alike(world_size, kind, embedding):
    sharded = sharded_results(world_size, SHARING)[f"{kind}-{embedding}"]
    initial = sharded["initial"]
    assert_alike(sharded, train_unsharded(kind, embedding, world_size, initial, SHARING))


def assert_alike(sharded: dict[str, Any], unsharded: dict[str, Any]) -> None:
    """Logits of all steps, and all weights at the end."""
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_dtype=False)
    close(sharded["logits"], unsharded["logits"])
    for ours, theirs in zip(sharded["dense"], unsharded["dense"], strict=True):
        close(ours, theirs)
    covered = {}
    for name, place, weight in sharded["shards"]:
        close(weight, unsharded["tables"][name][place])
        covered[name, str(place)] = weight.numel()
    assert sum(covered.values()) == sum(t.num_embeddings * t.embedding_dim for t in TABLES)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_one_fused_module_per_rank(world_size):
    """Whole tables and column shards fuse; row blocks are a second module."""
    results = sharded_results(world_size)
    for kind in ("table_wise", "columns_uneven", "columns_on_one_rank", "empty_rank", "row_wise"):
        assert results[f"{kind}-sgd"]["fused_modules"] == [1], kind
    # With one rank its only row block is the whole table.
    assert results["rows_and_columns-sgd"]["fused_modules"] == ([1, 1] if world_size > 1 else [1])


@functools.cache
def results_on_two_hosts() -> dict[str, Any]:
    cases = [("host_rows", embedding) for embedding in ON_CPUS]
    return run_ranks(train_sharded, 4, cases, local_world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ON_CPUS)
def test_rows_over_one_host(embedding):
    sharded = results_on_two_hosts()[f"host_rows-{embedding}"]
    assert_alike(sharded, train_unsharded("host_rows", embedding, 4, sharded["initial"]))
    assert sharded["fused_modules"] == [0, 1]  # rank 0 is on the other host
