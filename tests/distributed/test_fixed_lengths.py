"""Ids of which every sample has the same number: no host waits for counts, and all is equal."""

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torchrec.datasets.utils import Batch

from dlrm_sharded.datasets.base import BatchStream
from dlrm_sharded.datasets.synthetic import SyntheticDataset
from dlrm_sharded.plans.plan import Shard, ShardingPlan
from dlrm_sharded.ranks.distributed import Rank
from dlrm_sharded.training.pipeline import CLASSES
from tests.distributed.small_model import (
    LOCAL_BATCH_SIZE,
    PLANS,
    TABLES,
    make_model,
    make_sharded,
    optimizers,
    shard,
)
from tests.preloaded.ranks import gathered, run_ranks
from tests.unit.datasets.sharing import Sharing
from tests.unit.synthetic import column_shards

NUM_BATCHES = 5
OF_HOST = ("tolist", "item", "__bool__", "__int__", "__index__")
"""Methods of tensors with which a host waits for a device."""


class HostReads(TorchFunctionMode):
    """Counts the reads of tensors by the host within it, but those of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in OF_HOST:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def batches(rank: Rank) -> list[Batch]:
    dataset = SyntheticDataset(
        TABLES,
        batch_size=LOCAL_BATCH_SIZE * rank.world_size,
        num_train_batches=NUM_BATCHES,
        num_val_batches=0,
        num_dense=3,
    )
    assert dataset.ids_per_sample == {table.name: table.pooling_factor for table in TABLES}
    stream = BatchStream(dataset, "train", rank=rank.rank, world_size=rank.world_size)
    return [batch.to(rank.device) for batch in stream]


def train(rank: Rank, kind: str, pipeline: str, *, is_known: bool) -> tuple[list[float], int]:
    """Losses of all batches, and how often a step reads tensors of the device in the middle."""
    known = {table.name: int(table.pooling_factor) for table in TABLES} if is_known else None
    sharded, optimizer = make_sharded(rank, kind, "sgd", ids_per_sample=known)
    of_rank, losses, reads = iter(batches(rank)), [], HostReads()
    with contextlib.suppress(StopIteration):
        steps = CLASSES[pipeline](sharded, optimizer, rank.device)
        losses.append(steps.progress(of_rank)[0])
        with reads:
            losses.append(steps.progress(of_rank)[0])
        while True:
            losses.append(steps.progress(of_rank)[0])
    return torch.stack(losses).tolist(), reads.counts.total()


def train_both(rank: Rank, kind: str) -> dict[str, tuple[Any, Any]]:
    return {
        name: (train(rank, kind, name, is_known=True), train(rank, kind, name, is_known=False))
        for name in CLASSES
    }


@pytest.mark.parametrize(
    "kind", ["columns_uneven", pytest.param("empty_rank", marks=pytest.mark.slow)]
)
def test_no_host_waits_where_all_numbers_are_known(kind):
    for num_ranks in (1, 2):
        for pipeline, (known, unknown) in run_ranks(train_both, num_ranks, kind).items():
            assert known[0] == unknown[0], (num_ranks, pipeline)
            assert len(known[0]) == NUM_BATCHES
            assert known[1] == 0, (num_ranks, pipeline)
            if num_ranks > 1:
                assert unknown[1] > 0, pipeline


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in PLANS if kind != "empty_rank"])
def test_losses_of_all_plans_are_equal(kind):
    for pipeline, (known, unknown) in run_ranks(train_both, 2, kind).items():
        assert known[0] == unknown[0], pipeline
        assert known[1] <= unknown[1], pipeline


def train_sharing(rank: Rank, pipeline: str) -> list[list[float]]:
    """Mean losses of all ranks, where the numbers of ids are known and where they are not."""
    dataset, last = Sharing(2 * LOCAL_BATCH_SIZE, num_dense=3), rank.world_size - 1
    kind, item = dataset.tables
    shards = Shard.whole(kind, 0), *column_shards(item, (last, 4), (0, 4))
    losses = []
    for known in (dataset.ids_per_sample, None):
        model, plan = make_model(tables=dataset.tables), ShardingPlan(rank.world_size, shards)
        sharded = shard(rank, model, plan, optimizers("sgd"), dataset.tables, known)
        stream = BatchStream(dataset, "train", rank=rank.rank, world_size=rank.world_size)
        steps, of_rank = CLASSES[pipeline](*sharded, rank.device), iter(stream)
        own = torch.stack([steps.progress(of_rank)[0] for _ in range(len(stream))])
        losses.append(torch.stack(gathered(rank, own)).mean(dim=0).tolist())
    return losses


@pytest.mark.parametrize("pipeline", ["base", "sparse_dist"])
def test_features_that_share_a_table(pipeline):
    (alone, unknown), (two, unknown_of_two) = (
        run_ranks(train_sharing, num_ranks, pipeline) for num_ranks in (1, 2)
    )
    assert (alone, two) == (unknown, unknown_of_two)
    assert two == pytest.approx(alone, rel=1e-5)
