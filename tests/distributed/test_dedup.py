"""TorchRec's deduplicated ids of sequences, trained on 1, 2 and 3 ranks, bit for bit as without.

FBGEMM has no `jagged_unique_indices` for CPUs, so a stand-in does what its CUDA kernels do. Numbers
are such that all sums are exact: their order is another one with deduplicated ids.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import SGD
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_sharded import ShardedPlanner
from dlrm_sharded.ranks.distributed import Rank
from tests.distributed.sequence_layouts import halves, rows, rows_and_whole, whole
from tests.distributed.torchrec_modules import LaidOut
from tests.preloaded.ranks import gathered, run_ranks

ROWS, BATCH_SIZE, NUM_STEPS = (12, 40), 16, 3
FEATURES = {"t0": ["f0"], "t1": ["f1", "f2"]}
OPTIMIZERS = {"sgd": SGD, "rowwise_adagrad": RowWiseAdagrad}
LAYOUTS = {"whole": whole, "rows": rows, "both": rows_and_whole, "halves": halves}
WORLD_SIZES = (1, 2, 3)
EXCHANGED: list[int] = []
"""Ids that this rank has sent, by step."""


def unique_on_cpu(
    base_of_feature: Tensor, group_of_feature: Tensor, offsets: Tensor, ids: Tensor
) -> tuple[Tensor, ...]:
    """Return lengths, offsets, the unique ids of each table, and the place of each id in these."""
    num_features = len(base_of_feature) - 1
    batch_size = (len(offsets) - 1) // num_features
    of_feature = offsets[::batch_size].diff()
    based = ids + base_of_feature[:-1].repeat_interleave(of_feature)
    found, places = based.unique(return_inverse=True)
    lengths = torch.zeros(len(offsets) - 1, dtype=torch.int64)
    for i in range(num_features):
        # the first feature of a table has the unique ids of all its features
        first, end = (int(group_of_feature[k]) for k in (i, i + 1))
        if first == end:
            continue
        low, high = (torch.searchsorted(found, base_of_feature[k]) for k in (first, end))
        each, rest = divmod(int(high - low), (end - first) * batch_size)
        part = lengths[first * batch_size : end * batch_size]
        part += each
        part[:rest] += 1
    which = torch.searchsorted(base_of_feature, found, right=True) - 1
    EXCHANGED.append(len(found))
    total = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return lengths, total, found - base_of_feature[which], places


def features(step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 9, (3, BATCH_SIZE), generator=generator)
    ids = [
        torch.randint(0, ROWS[min(i, 1)], (int(n.sum()),), generator=generator)
        for i, n in enumerate(lengths)
    ]
    return KeyedJaggedTensor(
        keys=["f0", "f1", "f2"], values=torch.cat(ids), lengths=lengths.flatten().int()
    )


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the sum of all vectors, times small whole numbers that differ by place."""
    found = model(features(step, rank))
    vectors = torch.cat([found[f"f{i}"].values().flatten() for i in range(3)])
    return (vectors * (torch.arange(len(vectors)) % 7 - 3)).sum()


def train(rank: Rank, optimizer: str, layout: str, *, dedup: bool) -> dict[str, Tensor]:
    """Return this rank's weights after some steps, by table and place."""
    configs = [
        EmbeddingConfig(name=name, num_embeddings=n, embedding_dim=16, feature_names=FEATURES[name])
        for name, n in zip(FEATURES, ROWS, strict=True)
    ]
    model = EmbeddingCollection(tables=configs)
    apply_optimizer_in_backward(OPTIMIZERS[optimizer], model.parameters(), {"lr": 2.0**-4})
    sharders: list[Any] = [EmbeddingCollectionSharder(use_index_dedup=dedup)]
    planner = ShardedPlanner(LaidOut(LAYOUTS[layout]))
    # a planner that is told of it refuses it on CPUs
    plan = planner.collective_plan(model, [EmbeddingCollectionSharder()])
    sharded = DistributedModelParallel(model, plan=plan, device=rank.device, sharders=sharders)
    shards = {
        f"{name} {shard.metadata.shard_offsets}": shard.tensor
        for name, weight in sharded.state_dict().items()
        for shard in weight.local_shards()
    }
    for name, weight in shards.items():
        weight.copy_(torch.arange(weight.numel()).reshape(weight.shape) % 32 / 8 + len(name))
    for step in range(NUM_STEPS):
        # times the number of ranks, by which TorchRec divides, so that this is exact on three
        (rank.world_size * loss_of(sharded, step, rank.rank)).backward()
    return {name: weight.clone() for name, weight in shards.items()}


def compare(rank: Rank) -> dict[str, Any]:
    """Return whether all weights changed and are equal, and the ids that were sent, by case.

    Weights begin as multiples of 1/8, and a step changes them by finer parts.
    """
    library = torch.library.Library("fbgemm", "IMPL")
    library.impl("jagged_unique_indices", unique_on_cpu, "CPU")
    results = {}
    for optimizer in OPTIMIZERS:
        for layout in LAYOUTS:
            EXCHANGED.clear()
            one = train(rank, optimizer, layout, dedup=False)
            assert not EXCHANGED
            other = train(rank, optimizer, layout, dedup=True)
            is_equal = all(torch.equal(one[name], other[name]) for name in one)
            is_changed = all((w * 8 != (w * 8).round()).any() for w in other.values())
            results[f"{optimizer}-{layout}"] = gathered(
                rank, (is_equal and is_changed and one.keys() == other.keys(), sum(EXCHANGED))
            )
    num_ids = sum(len(features(step, rank.rank).values()) for step in range(NUM_STEPS))
    return results | {"ids": gathered(rank, num_ids)}


@functools.cache
def results(world_size: int) -> dict[str, Any]:
    """All cases in one start of the processes."""
    return dict(run_ranks(compare, world_size))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_deduplicated_ids_train_the_same_weights(
    world_size: int, optimizer: str, layout: str
) -> None:
    found = results(world_size)
    for (is_equal, num_sent), num_ids in zip(
        found[f"{optimizer}-{layout}"], found["ids"], strict=True
    ):
        assert is_equal
        assert 0 < num_sent < 0.7 * num_ids
