"""The ids of global batches, table by table, so that only a rank's tables are drawn.

All ranks that hold pieces of a table see the same ids: they follow from the seed, the table and
the number of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor

from dlrm_sharded.accesses.profiles import ASSUMED_EXPONENT
from dlrm_sharded.accesses.zipf import cached_zipf, scatter_ranks
from dlrm_sharded.datasets.base import Dataset, PerTableDataset
from dlrm_sharded.datasets.counter_random import stream_key
from dlrm_sharded.measuring.rank_bench import Ids, TableIds
from dlrm_sharded.plans.tables import NUM_REUSE_BINS, Table
from dlrm_sharded.plans.task import ShardingTask

MAX_BATCH_IDS = 200_000_000
"""Largest batch that is kept whole: 0.8 GB of ids."""

KEPT_IDS = 100_000_000
"""Ids of the tables that were drawn last, which are kept for the next rank's pieces of them."""

USES_OF_BIN = np.array([1.0, 2.0, *(0.75 * 2.0 ** np.arange(2, NUM_REUSE_BINS))])
"""Uses of a row of each reuse bin: the mean of the numbers of uses that fall into the bin."""

DrawTable = Callable[[Table, int], Ids]
"""Returns the ids of a table in the batch with a number."""


class DrawnBatch(dict[str, Ids]):
    """One global batch, whose ids are drawn when a table is asked for.

    Args:
        draw: draws the ids of the table with a name.
        kept_ids: number of ids up to which the tables that were drawn last are kept.
    """

    def __init__(self, draw: Callable[[str], Ids], *, kept_ids: int) -> None:
        self._draw = draw
        self._kept_ids = kept_ids

    def __missing__(self, name: str) -> Ids:
        ids = self[name] = self._draw(name)
        while len(self) > 1 and sum(len(kept.values) for kept in self.values()) > self._kept_ids:
            del self[next(iter(self))]
        return ids


def drawn_ids(task: ShardingTask, draw: DrawTable, *, num_batches: int) -> TableIds:
    """Return batches of ids for all tables of a task, which are drawn when they are needed."""
    tables = {table.name: table for table in task.tables}

    def of_batch(batch: int) -> DrawnBatch:
        kept_ids = KEPT_IDS // num_batches
        return DrawnBatch(lambda name: draw(tables[name], batch), kept_ids=kept_ids)

    return TableIds(tables, tuple(map(of_batch, range(num_batches))), task.topology.world_size)


def ids_source(task: ShardingTask, dataset: Dataset | None, *, seed: int) -> tuple[DrawTable, str]:
    """Return what draws a table's ids, and a sentence that says where the ids come from.

    They are the ids of the dataset's training batches where those can be read: table by table, or
    whole batches that fit the memory. Otherwise they are drawn from the tables' profiles.
    """
    num_batches = 0 if dataset is None else dataset.num_batches("train")
    if dataset is not None and num_batches:
        num_ids = task.batch_size * sum(table.pooling_factor for table in task.tables)
        of_data = "the ids are those of the dataset's training batches"
        if isinstance(dataset, PerTableDataset):
            read = dataset.table_ids
            return (lambda table, i: Ids(*read(table.name, "train", i % num_batches))), of_data
        if num_ids <= MAX_BATCH_IDS:
            return _of_batches(dataset, num_batches), of_data
    unknown = sum(table.reuse_histogram is None for table in task.tables)
    source = "the ids are drawn from the reuse histograms of the tables"
    if unknown:
        source += (
            f"; {unknown} of {len(task.tables)} tables have none, and their ids follow a Zipf "
            f"distribution with exponent {ASSUMED_EXPONENT:g}"
        )
    return (lambda table, batch: draw_profile(table, task.batch_size, seed, batch)), source


def _of_batches(dataset: Dataset, num_batches: int) -> DrawTable:
    @functools.cache
    def ids_of(number: int) -> dict[str, JaggedTensor]:
        batch = dataset.batch("train", number, rank=0, world_size=1)
        return batch.sparse_features.to_dict()

    def draw(table: Table, batch: int) -> Ids:
        ids = ids_of(batch % num_batches)[table.name]
        return Ids(ids.values().int().numpy(), ids.lengths().int().numpy())

    return draw


def draw_profile(table: Table, batch_size: int, seed: int, batch: int) -> Ids:
    """Draw ids whose reuse in the batch is that of the table's profile.

    Every sample has the mean number of ids, rounded up or down at random. The most used rows are
    the same in all batches; those that a batch uses once differ.
    """
    rng = np.random.default_rng([stream_key(seed, "simulation", table.name), batch])
    lengths = np.floor(table.pooling_factor + rng.random(batch_size)).astype(np.int32)
    num_ids = int(lengths.sum(dtype=np.int64))
    if table.reuse_histogram is None or not sum(table.reuse_histogram):
        bits = rng.integers(0, 2**64, size=num_ids, dtype=np.uint64)
        ranks = cached_zipf(table.num_embeddings, ASSUMED_EXPONENT).ranks(bits)
    else:
        ranks = _ranks_with_reuse(table, table.reuse_histogram, num_ids, rng)
    shift = stream_key(seed, "rows", table.name)
    ids = scatter_ranks(ranks, table.num_embeddings, shift % table.num_embeddings)
    return Ids(ids.astype(np.int32), lengths)


def _ranks_with_reuse(
    table: Table, histogram: tuple[float, ...], num_ids: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return [N], ranks of rows by how often they are used, in random order."""
    shares = np.array(histogram) / sum(histogram)
    num_unique = min(num_ids / float(shares @ USES_OF_BIN), table.num_embeddings)
    counts = np.floor(num_unique * shares[::-1] + 0.5).astype(np.int64)  # the most used come first
    uses = np.repeat(USES_OF_BIN[::-1].astype(np.int64), counts)[: table.num_embeddings]
    rows = np.arange(len(uses), dtype=np.int64)
    first_cold = int(counts[:-1].sum())  # rows of the last bin are used once
    num_rest = table.num_embeddings - first_cold
    if len(rows) > first_cold and num_rest > 0:
        moved = rows[first_cold:] - first_cold + int(rng.integers(num_rest))
        rows[first_cold:] = first_cold + moved % num_rest
    ranks = rng.permutation(np.repeat(rows, uses))[:num_ids]
    missing = num_ids - len(ranks)
    if missing > 0:  # rounding, or a table with too few rows for the uses
        pool = ranks if len(ranks) else np.zeros(1, dtype=np.int64)
        ranks = np.concatenate([ranks, rng.choice(pool, missing)])
    return ranks
