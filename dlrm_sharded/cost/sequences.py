"""Updates of sequence tables on CPUs, where FBGEMM has no fused kernel for them.

Its backward pass of bags sorts the ids and updates rows by a generated kernel. That of sequences
(`split_embedding_nobag_backward_exact_cpu_kernel`) sums the gradients of each row in a hash map
that all tables of a lookup share. So a row takes longer the more rows the rank's sequences use,
once the map leaves the caches. In both passes, a fit to measured plans also finds by how much each
term of work differs from that of bags of one id (the last of `CostNet.slopes`). Lookups on GPUs,
where both passes have kernels of the same kind, take as long as those of bags.

Letters: N ranks, S shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlrm_sharded.cost.features import LINE_COLUMNS
from dlrm_sharded.cost.workload import Floats, Workload


@dataclass(frozen=True, slots=True)
class SequenceCosts:
    """Additional costs of updates on CPUs over bags of one id; the crowding of `ComputeModel`.

    Args:
        line_ms: ms per 1,000 rows and cache lines of rows, with the map in the caches.
        far_row_ms: ms per 1,000 rows whose entries of the map are beyond the caches.
        half_rows: thousands of rows of which half are beyond; that share is a logistic function of
            the natural logarithm of the rows, with slope 2.
    """

    line_ms: float = 0.0
    far_row_ms: float = 0.0
    half_rows: float = 48.0

    num_parts: ClassVar[int] = 1
    """The parts of a time in each direction; updates are in the backward one."""

    def scaled(self, factors: Floats) -> SequenceCosts:
        """Return the costs multiplied by factors [2, 1], of which only the backward one counts."""
        factor = float(factors[1, 0])
        return SequenceCosts(self.line_ms * factor, self.far_row_ms * factor, self.half_rows)

    def columns(self, workload: Workload) -> Floats:
        """Return [S, 2], thousands of distinct rows that sequences look up; rows and lines."""
        rows = np.where(workload.is_sequence, workload.num_unique / 1e3, 0.0)
        return np.column_stack([rows, rows * (1.0 + np.ceil(workload.num_cols / LINE_COLUMNS))])

    def parts_ms(self, vectors: Floats, crowd: Floats) -> Floats:
        """Return [2, N, 1], time of updates of shards [N, 2] in a crowd [N, 2]."""
        (rows, lines), squares = vectors.T, crowd[:, 0] ** 2
        far_ms = self.far_row_ms * rows * squares / (squares + self.half_rows**2)
        backward = self.line_ms * lines + far_ms
        return np.stack([np.zeros_like(backward), backward])[:, :, None]
