"""A table whose shape and accesses were drawn, so that it can be measured without a task."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_sharded.accesses.patterns import AccessPattern


@dataclass(frozen=True, slots=True)
class DrawnTable:
    """A table of a random plan, whole on one rank, or on all of them (rank None).

    Args:
        accesses: how often a batch uses which of its rows.
        replicated: whether a table on all ranks is whole on each, and not in even row blocks.
        pooled: see `Table.pooled`.
    """

    num_rows: int
    num_cols: int
    pooling_factor: float
    accesses: AccessPattern
    rank: int | None
    replicated: bool = False
    pooled: bool = True
