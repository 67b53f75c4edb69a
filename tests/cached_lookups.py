"""FBGEMM's lookups on a CPU, with a cache of rows as its kernel on GPUs has one.

`python -m tests.cached_lookups OVERRIDES` is a training run with them.
"""

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

NUM_ROWS = 8
"""Rows that a cache holds, unless one batch needs more."""


Place = tuple[int, int]
"""Begin and end of a row in the memory of all tables of a lookup."""


class RowCache:
    """Rows of a lookup, which come in, are changed here, and go back by eviction or a flush.

    As on a GPU, a row that is in the cache wins over what is in memory. Rows that are not in it are
    NaNs here, so that a lookup that reads one without fetching it shows.
    """

    def __init__(self, lookup: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self._lookup = lookup
        self._memory = lookup.weights_host.data
        self.weights = nn.Parameter(torch.full_like(self._memory, torch.nan))
        self._held: OrderedDict[Place, None] = OrderedDict()
        self.num_evicted = 0

    def fetch(self, ids: Tensor, offsets: Tensor) -> None:
        """Bring the rows of a batch in, and evict those that were not used for longest."""
        wanted = dict.fromkeys(self._rows(ids, offsets))
        for place in wanted:
            if place not in self._held:
                self.weights.data[slice(*place)] = self._memory[slice(*place)]
                self._held[place] = None
            self._held.move_to_end(place)
        while len(self._held) > max(NUM_ROWS, len(wanted)):
            place, _ = self._held.popitem(last=False)
            self._memory[slice(*place)] = self.weights.data[slice(*place)]
            self.weights.data[slice(*place)] = torch.nan
            self.num_evicted += 1

    def flush(self) -> None:
        for place in self._held:
            self._memory[slice(*place)] = self.weights.data[slice(*place)]

    def reset(self) -> None:
        """Forget all rows, without writing them back."""
        self._held.clear()
        self.weights.data.fill_(torch.nan)

    def _rows(self, ids: Tensor, offsets: Tensor) -> Iterator[Place]:
        lookup = self._lookup
        features = lookup.feature_table_map
        batch_size = (len(offsets) - 1) // len(features)
        for number, table in enumerate(features):
            first, last = offsets[[number * batch_size, (number + 1) * batch_size]].tolist()
            dim = lookup.embedding_specs[table][1]
            begin = lookup.weights_physical_offsets[table]
            for row in ids[first:last].tolist():
                yield begin + row * dim, begin + (row + 1) * dim


@contextlib.contextmanager
def cached_lookups() -> Iterator[list[RowCache]]:
    """Give the lookups of models caches; yield those of all lookups so far."""
    kernel = SplitTableBatchedEmbeddingBagsCodegen
    look_up = kernel.forward
    caches: dict[int, RowCache] = {}
    found: list[RowCache] = []

    def cache_of(lookup: Any) -> RowCache:
        if id(lookup) not in caches:  # a cache keeps its lookup, and so the number
            caches[id(lookup)] = RowCache(lookup)
            found.append(caches[id(lookup)])
        return caches[id(lookup)]

    def forward(self: Any, indices: Tensor, offsets: Tensor, *args: Any, **others: Any) -> Tensor:
        cache = cache_of(self)
        cache.fetch(indices, offsets)
        memory = self.weights_host
        self.weights_host = cache.weights  # the backward pass updates what was looked up
        try:
            return look_up(self, indices, offsets, *args, **others)
        finally:
            self.weights_host = memory

    with (
        patch.object(kernel, "forward", forward),
        patch.object(kernel, "flush", lambda self: cache_of(self).flush()),
        patch.object(kernel, "reset_cache_states", lambda self: cache_of(self).reset()),
    ):
        yield found


def main() -> None:
    from dlrm_sharded.train import main as train

    with cached_lookups():
        train()


if __name__ == "__main__":
    sys.argv[0] = "dlrm-train"
    main()
