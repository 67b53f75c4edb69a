"""Updates of tables of sequences on CPUs, where FBGEMM has no fused kernel for them.

Its backward pass of bags sorts the ids and updates rows by a generated kernel. That of sequences
(`split_embedding_nobag_backward_exact_cpu_kernel`) sums the gradients of each row in a hash map
that all tables of a lookup share. So a row takes longer the more rows the rank's sequences use,
once the map leaves the caches. In both passes, a fit to measured plans also finds by how much each
term of work differs from that of bags of one id (the last of `PriceNet.slopes`). Lookups on GPUs,
where both passes have kernels of the same kind, take as long as those of bags.

Letters: N ranks, S shards.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.features import LINE_COLUMNS
from dlrm_sharded.cost.workload import Floats, Workload


@dataclass(frozen=True, slots=True)
class SequencePrices:
    """Prices of updates in addition to those of bags of one id each, in ms per 1,000.

    Args:
        line_ms: a row and each of its cache lines, with a map in the caches.
        far_row_ms: a row whose place in the map is beyond them.
        half_rows: thousands of rows of which half are beyond; the share is that of a logistic
            function of the logarithm, as for `PriceNet.overflow`, with slope 2.
    """

    line_ms: float = 0.0
    far_row_ms: float = 0.0
    half_rows: float = 48.0

    def scaled(self, factor: float) -> SequencePrices:
        """Return the prices multiplied by a factor."""
        return dataclasses.replace(
            self, line_ms=self.line_ms * factor, far_row_ms=self.far_row_ms * factor
        )

    def near_ms(self, workload: Workload) -> Floats:
        """Return [S], times of the shards' updates with a map in the caches."""
        lines = np.ceil(workload.num_cols / LINE_COLUMNS)
        return self.line_ms * sequence_rows(workload) * (1.0 + lines)

    def far_ms(self, rows: Floats, crowd: Floats) -> Floats:
        """Return [N], what rows beyond the caches add.

        Args:
            rows: [N], thousands of rows, see `sequence_rows`.
            crowd: [N], sums of those of all shards of the rank.
        """
        squares = crowd**2
        return self.far_row_ms * rows * squares / (squares + self.half_rows**2)

    def terms(self, workload: Workload) -> Floats:
        """Return [W, 2], what `line_ms` and `far_row_ms` of ranks are paid for."""
        rows = workload.by_rank(sequence_rows(workload))
        near = dataclasses.replace(self, line_ms=1.0).near_ms(workload)
        far = dataclasses.replace(self, far_row_ms=1.0).far_ms(rows, rows)
        return np.column_stack([workload.by_rank(near), far])


def sequence_rows(workload: Workload) -> Floats:
    """Return [S], thousands of different rows that sequences look up; 0 for bags."""
    return np.where(workload.is_sequence, workload.num_unique / 1e3, 0.0)
