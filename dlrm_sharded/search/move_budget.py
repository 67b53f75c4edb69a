"""Limits on how much a plan may differ from an earlier one.

Letters: U units; see `problem.py`.
"""

from __future__ import annotations

import numpy as np

from dlrm_sharded.cost.workload import Floats, Mask
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.search.state import State
from dlrm_sharded.search.state_shards import ShardsByTable, moved_bytes, unit_shards


class MoveBudget:
    """Limits on the moves of a state, and an account of the moves so far.

    Args:
        earlier: the plan that the state started from.
        max_tables: number of tables whose shards may change; None for any number.
        max_moved_bytes: memory that may move to other ranks; None for any.

    Attributes:
        changeable: [U], units that may be changed; None for all.
        max_bytes: [U], how much of a unit may move at once; None for any.
    """

    def __init__(
        self,
        state: State,
        earlier: ShardsByTable,
        max_tables: int | None,
        max_moved_bytes: int | None,
    ) -> None:
        self._state = state
        self._earlier = earlier
        self._max_tables = max_tables
        self._max_moved_bytes = max_moved_bytes
        self._moved: dict[int, tuple[int, int]] = {}
        self._update()

    def accept(self, units: set[int]) -> bool:
        """Return whether the state is within limits after a change of these units.

        If it is, the change is entered into the account.
        """
        moved = dict(self._moved)
        for unit in units:
            moved.pop(unit, None)  # it is counted anew, and may have moved back
            num_tables, num_bytes = self._moved_tables_and_bytes(unit)
            if num_tables:
                moved[unit] = num_tables, num_bytes
        sums = [sum(amounts) for amounts in zip(*moved.values(), strict=True)]
        # Without any moved unit there are no sums, and nothing to compare.
        for limit, amount in zip((self._max_tables, self._max_moved_bytes), sums, strict=False):
            if limit is not None and amount > limit:
                return False
        self._moved = moved
        self._update()
        return True

    def _update(self) -> None:
        """Bring the attributes up to date with the account."""
        self.changeable: Mask | None = None
        self.max_bytes: Floats | None = None
        tables, moved = self._state.problem.tables, list(self._moved)
        if self._max_tables is not None:
            left = self._max_tables - sum(count for count, _ in self._moved.values())
            self.changeable = np.array([len(unit) <= left for unit in tables])
            self.changeable[moved] = True
        if self._max_moved_bytes is not None:
            left = self._max_moved_bytes - sum(size for _, size in self._moved.values())
            self.max_bytes = np.full(len(tables), float(left))
            # A unit that moved may move back, which costs nothing: `accept` computes it exactly.
            self.max_bytes[moved] = np.inf

    def _moved_tables_and_bytes(self, unit: int) -> tuple[int, int]:
        """Return how many of a unit's tables moved, and how many bytes."""
        task = self._state.problem.task
        now: dict[str, list[Shard]] = {}
        for shard in unit_shards(self._state, unit, self._earlier):
            now.setdefault(shard.table, []).append(shard)
        changed = [name for name, shards in now.items() if shards != list(self._earlier[name])]
        num_bytes = sum(moved_bytes(task, self._earlier[name], now[name]) for name in changed)
        return len(changed), num_bytes
