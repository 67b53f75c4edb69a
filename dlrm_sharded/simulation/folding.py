"""Lets the shards of a rank fit the memory of this machine: the largest ones get fewer rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.measuring.rank_bench import Ids, ShardIds
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.plans.tables import Table
from dlrm_sharded.plans.task import GIB

MIN_ROWS = 1000
"""Rows that a folded shard keeps at least; with fewer, its ids would all be in the cache."""


@dataclass(frozen=True, slots=True)
class FoldedIds:
    """Ids of shards, some with fewer rows than in the plan; ids are taken modulo those rows.

    Args:
        ids: of the shards as they are in the plan.
        unfolded: the shard of the plan for each shard that has fewer rows.
    """

    ids: ShardIds
    unfolded: Mapping[Shard, Shard]

    @property
    def tables(self) -> Mapping[str, Table]:
        return self.ids.tables

    @property
    def num_batches(self) -> int:
        return self.ids.num_batches

    def shard_ids(self, shard: Shard, batch: int) -> Ids:
        """Return the ids of one batch that reach the shard."""
        if shard not in self.unfolded:
            return self.ids.shard_ids(shard, batch)
        ids = self.ids.shard_ids(self.unfolded[shard], batch)
        return Ids(ids.values % np.int32(shard.num_rows), ids.lengths)

    def is_row_block(self, shard: Shard) -> bool:
        """Return whether the shard of the plan lacks rows of its table."""
        return self.ids.is_row_block(self.unfolded.get(shard, shard))


def fold(
    shards: Sequence[Shard], ids: ShardIds, *, limit_bytes: int
) -> tuple[list[Shard], FoldedIds]:
    """Return the shards, the largest of them with so few rows that all fit the limit.

    Raises:
        ConfigError: the limit does not even hold `MIN_ROWS` rows of every shard.
    """
    sizes = np.array([shard.weight_bytes for shard in shards], dtype=np.float64)
    most_bytes = _water_level(sizes, limit_bytes)
    folded, unfolded = [], {}
    for shard in shards:
        if shard.weight_bytes <= most_bytes:
            folded.append(shard)
            continue
        bytes_per_row = shard.weight_bytes // shard.num_rows
        num_rows = int(most_bytes // bytes_per_row)
        if num_rows < min(MIN_ROWS, shard.num_rows):
            raise ConfigError(
                f"rank {shard.rank} has {sizes.sum() / GIB:.2f} GiB of tables in {len(shards)} "
                f"shards, and table_gib = {limit_bytes / GIB:.2f} holds less than {MIN_ROWS:,} "
                "rows of each; use a machine with more memory, or raise table_gib"
            )
        smaller = dataclasses.replace(shard, rows=(shard.rows[0], shard.rows[0] + num_rows))
        unfolded[smaller] = shard
        folded.append(smaller)
    return folded, FoldedIds(ids, unfolded)


def _water_level(sizes: NDArray[np.float64], limit: float) -> float:
    """Return the level at which sizes are cut so that they sum to the limit; inf if they fit."""
    if sizes.sum() <= limit:
        return math.inf
    rising = np.sort(sizes)
    for i, size in enumerate(rising):
        level = (limit - rising[:i].sum()) / (len(rising) - i)
        if level <= size:
            return float(level)
    return float(rising[-1])
