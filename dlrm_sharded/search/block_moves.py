"""Improve: moves of units into row blocks and out of them.

Letters: G groups of one kind, L loads, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dlrm_sharded.cost.workload import Floats, Indices
from dlrm_sharded.search.moves import Move, StateMoves
from dlrm_sharded.search.problem import by_group
from dlrm_sharded.search.smooth_objective import SmoothObjective
from dlrm_sharded.search.state import COLUMNS, Edit, SetGroup, SetWidth

NUM_ROW_CUTS = 2
"""Number of a rank's costliest pieces for which row blocks are tried. Study: row blocks."""

MAX_ROW_JOINS = 16
"""Largest number of units in row blocks that `row_joins` tries at a time. Study: row blocks."""


MAX_OTHER_CUTS = 256
"""Largest number of units for which row blocks are tried when no rank has a move left. Study: row
blocks."""


class BlockNeighborhood(StateMoves):
    """Moves that cut units into row blocks, and that make units in row blocks whole."""

    def row_cuts(self, rank: int, objective: SmoothObjective) -> list[Move]:
        """Return moves that put the costliest units of a rank in row blocks."""
        if not self.splits:
            return []
        units = self.state.costliest_units(self._changeable_slots(rank), NUM_ROW_CUTS)
        return self._cuts_of(units, objective)

    def other_cuts(self, objective: SmoothObjective) -> list[Move]:
        """Return moves that put units of any ranks in row blocks, which may help all ranks."""
        if not self.splits or not self.problem.blocks:
            return []
        units = self._changeable(np.flatnonzero(self.state.group == COLUMNS))
        return self._cuts_of(self._sample(units, MAX_OTHER_CUTS).tolist(), objective)

    def _cuts_of(self, units: list[int], objective: SmoothObjective) -> list[Move]:
        """Return moves that put units in row blocks, on the best group for each kind."""
        state, problem = self.state, self.problem
        moves: list[Move] = []
        for unit in units:
            if not any(blocks.possible[unit] for blocks in problem.blocks):
                continue
            # The ranks without the unit, which may have pieces on several of them.
            load, free_bytes = state.load.copy(), state.free_bytes.copy()
            shared_ms = state.shared_ms
            for other, width in state.widths[unit].items():
                shape = problem.shape(unit, width)
                load[other] -= problem.load[shape]
                free_bytes[other] += problem.size_bytes[shape]
                shared_ms -= float(problem.shared_ms[shape])
            remove = [SetWidth(unit, other, 0) for other in state.widths[unit]]
            is_last = state.num_in_all_to_all[problem.owners[unit][0]] == len(remove)
            for group, value_ms in self._best_groups(unit, load, free_bytes, objective):
                change_ms = value_ms + shared_ms - objective.value_ms
                if is_last and problem.blocks_of_group(group).is_global:  # no all-to-all is left
                    change_ms -= problem.exchange_costs.fixed_ms
                moves.append(Move(change_ms, [*remove, SetGroup(unit, group)]))
        return moves

    def row_joins(self, objective: SmoothObjective) -> list[Move]:
        """Return moves of units in row blocks to the best other groups, or whole to a rank."""
        state, problem = self.state, self.problem
        units = np.flatnonzero((state.group != COLUMNS) & ~problem.must_replicate)
        units = self._changeable(units)
        if not len(units):
            return []
        before_ms = float(objective.norm_ms(objective.powers.sum(axis=0)))
        moves: list[Move] = []
        for unit in self._sample(units, MAX_ROW_JOINS).tolist():
            group, whole = int(state.group[unit]), int(problem.whole_shape[unit])
            members, blocks = problem.groups[group].members, problem.blocks_of_group(group)
            load, free_bytes = state.load.copy(), state.free_bytes.copy()
            load[members] -= blocks.load[unit]
            free_bytes[members] += blocks.size_bytes[unit]
            shared_ms = -float(blocks.shared_ms[unit])
            if state.num_in_group[group, problem.owners[unit][0]] == 1:  # the last of its module
                shared_ms -= blocks.fixed_shared_ms
                load[members] -= blocks.fixed_load
            if self.splits:
                rest_ms = (state.shared_ms + shared_ms) - objective.value_ms
                moves += [
                    Move(value_ms + rest_ms, [SetGroup(unit, COLUMNS), SetGroup(unit, other)])
                    for other, value_ms in self._best_groups(unit, load, free_bytes, objective)
                    if other != group
                ]
            fits = (free_bytes >= problem.size_bytes[whole]) & state.allowed_ranks(unit)
            if not fits.any():
                continue
            shared_ms += float(problem.shared_ms[whole])
            powers = objective.powers_of(load)
            after = objective.powers_of(load + problem.load[whole])
            # [W], the norms if that rank has the whole unit: the sums of all ranks' powers, minus
            # what the rank had, plus what it has then.
            values = objective.norm_ms(powers.sum(axis=0) - powers + after)
            rank = int(np.where(fits, values, np.inf).argmin())
            edits: list[Edit] = [
                SetGroup(unit, COLUMNS),
                SetWidth(unit, rank, int(problem.num_steps[unit])),
            ]
            moves.append(Move(float(values[rank]) - before_ms + shared_ms, edits))
        return moves

    def _changeable(self, units: Indices) -> Indices:
        """Return the units that the budget lets change."""
        if self.budget is None or self.budget.changeable is None:
            return units
        return units[self.budget.changeable[units]]

    def _best_groups(
        self, unit: int, load: Floats, free_bytes: Indices, objective: SmoothObjective
    ) -> Iterator[tuple[int, float]]:
        """Yield the best group for each kind of row blocks of a unit, and the value with them.

        Args:
            load: [W, L], loads of all ranks without the unit.
        """
        state, problem = self.state, self.problem
        # Row blocks are small and on many ranks, so host loads are assumed to be unchanged.
        norms_ms = float(objective.norm_ms(objective.powers.sum(axis=0)))
        host_ms = 0.0
        if objective.has_hosts:
            host_ms = objective.value_ms - state.shared_ms - norms_ms
        powers = objective.powers_of(load)  # of the ranks without the unit
        allowed = state.allowed_ranks(unit)
        for blocks in problem.blocks:
            if not blocks.possible[unit]:
                continue
            size = blocks.group_size
            # [G]: a group that reduces nothing of the module yet would also pay the fixed time.
            number = state.num_in_group[blocks.groups.start : blocks.groups.stop]
            is_first = number[:, problem.owners[unit][0]] == 0
            added = blocks.load[unit] + is_first[:, None] * blocks.fixed_load  # [G, L]
            # The sums of powers: those of all groups, minus one group's before, plus its new one.
            before = by_group(powers, size).sum(axis=1)
            after_powers = objective.powers_of(load + np.repeat(added, size, axis=0))
            after = by_group(after_powers, size).sum(axis=1)
            values = objective.norm_ms(before.sum(axis=0) - before + after)
            fits = by_group(free_bytes, size) >= blocks.size_bytes[unit]
            fits = (fits & by_group(allowed, size)).all(axis=1)
            if fits.any():
                best = int(np.where(fits, values, np.inf).argmin())
                shared_ms = float(blocks.shared_ms[unit])
                shared_ms += blocks.fixed_shared_ms * bool(is_first[best])
                yield blocks.groups[best], float(values[best]) + (shared_ms + host_ms)
