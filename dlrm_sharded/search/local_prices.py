"""Prices of pieces near one plan, from predictions of plans that differ from it in one unit.

A model that only predicts tells no prices. Its predictions tell differences: by how much a rank
takes longer with a unit than without it, and how that changes if the unit is cut. Near the plan,
these are prices whatever the model is, so that a search under them knows where to look next.

What all ranks pay for a whole unit is in no difference between ranks. It counts as nothing, or as
much as another layout saves all ranks.

Letters: n plans or units, U units, N shapes of all units, W ranks, L loads, P parts of a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dlrm_sharded.cost.shapes import Indices
from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.search.predictions import COMPUTE, EXCHANGE, Predictions, loads_of
from dlrm_sharded.search.problem import Blocks, Demand, LoadWeights, Problem
from dlrm_sharded.search.state import COLUMNS, State
from dlrm_sharded.search.state_shards import shards_of_unit, unit_shards

COSTLY = 0.02
"""Share of a rank's mean time from which on splits of a unit are priced; others gain nothing."""

NUM_TOGETHER = 8
"""Largest number of units that are laid out alike to find what only the first of them costs."""

LEAST_MS = 1e-6
"""Least time of each part of a piece: the smooth objective needs loads that are not all 0."""


class Change(NamedTuple):
    """A unit in another layout: on a group, or in column pieces of these widths by rank."""

    unit: int
    group: int = COLUMNS
    widths: tuple[tuple[int, int], ...] = ()


def local_problem(state: State, predictions: Predictions, split_error: float) -> Problem:
    """Return the problem of a state with prices that hold near its plan.

    Args:
        split_error: see `build_problem`.

    Raises:
        TimeoutError: the time is over before all prices are known.
    """
    problem, near = state.problem, _Neighbors(state, predictions)
    own_ms, shared_ms, shares = near.columns()
    load, margin, demand = _loads(problem.weights, own_ms, np.where(shares < 1.0, split_error, 0.0))
    blocks, saved_ms = list[Blocks](), np.zeros(problem.num_units)
    gain_ms = near.whole_ms.sum(axis=1) / problem.world_size
    for kind in problem.blocks:
        of_kind_ms, of_all_ms, first_ms = near.blocks(kind)
        if kind.is_replica:
            gain_ms -= of_kind_ms.sum(axis=1) + of_all_ms
        saved_ms = np.maximum(saved_ms, -of_all_ms)
        kind_load, kind_margin, kind_demand = _loads(problem.weights, of_kind_ms, split_error)
        made = dataclasses.replace(
            kind,
            load=kind_load,
            margin=kind_margin,
            demand=kind_demand,
            missing=np.zeros_like(kind_demand),  # it is predicted for all ranks together
            shared_ms=of_all_ms,
        )
        fixed_load = first_ms * problem.weights.exchange * (not kind.is_global)
        blocks.append(dataclasses.replace(made, fixed_ms=first_ms, fixed_load=fixed_load))
    return dataclasses.replace(
        problem,
        demand=demand,
        load=load,
        margin=margin,
        # A search needs times that are not negative.
        shared_ms=shared_ms + shares * np.repeat(saved_ms, problem.num_steps),
        blocks=tuple(dataclasses.replace(b, shared_ms=b.shared_ms + saved_ms) for b in blocks),
        replica_gain_ms=gain_ms,
    )


class _Neighbors:
    """Predicts plans that differ from that of a state in a few units.

    Attributes:
        whole_ms: [U, P], what each whole unit adds to its rank.
    """

    def __init__(self, state: State, predictions: Predictions) -> None:
        self._problem, self._predictions = state.problem, predictions
        self._steps, units = state.problem.num_steps, np.arange(state.problem.num_units)
        self._shards = [unit_shards(state, unit) for unit in range(len(units))]
        self._base_ms = self._parts_ms([()])[0]
        emptiest = np.argsort(self._base_ms.sum(axis=1), kind="stable").tolist()
        # Each unit is tried on two ranks: its own if it has one, and an empty one.
        self._homes = np.array([next(iter(widths), emptiest[0]) for widths in state.widths])
        self._others = np.where(self._homes == emptiest[0], emptiest[1], emptiest[0])
        self._is_whole = np.array([max(w.values(), default=0) for w in state.widths]) == self._steps
        home_ms = self._cut_ms(units, self._homes, self._steps)
        other_ms = self._cut_ms(units, self._others, self._steps)
        # A rank without the unit is seen where the unit is on the other one.
        self._without_ms = home_ms.copy()
        self._without_ms[units, self._homes] = other_ms[units, self._homes]
        added_ms = home_ms[units, self._homes] - other_ms[units, self._homes]
        added_ms += other_ms[units, self._others] - home_ms[units, self._others]
        self.whole_ms = np.maximum(added_ms / 2, 0.0)
        mean_ms = self._base_ms.sum() / len(self._base_ms)
        self._is_costly = self.whole_ms.sum(axis=1) >= COSTLY * mean_ms

    def columns(self) -> tuple[Floats, Floats, Floats]:
        """Return prices of all column shapes: [N, P] of their ranks and [N] of all, and [N] shares.

        Costly units are cut at a quarter, and prices are linear in the columns. A part of any other
        unit costs as much as the whole. A share is that of the unit's columns.
        """
        units = np.flatnonzero(self._is_costly & (self._steps > 1))
        home = self._homes[units]
        narrow = np.where(self._steps < 4, self._steps // 2, self._steps // 4)
        ms = self._cut_ms(units, home, narrow[units]) - self._without_ms[units]
        elsewhere = np.ones(ms.shape[:2], dtype=bool)
        elsewhere[np.arange(len(units))[:, None], np.stack([home, self._others[units]], 1)] = False
        shared_ms = (ms * elsewhere[:, :, None]).sum(axis=1) / max(1, ms.shape[1] - 2)
        narrow_ms, piece_ms = self.whole_ms.copy(), np.zeros(len(self._steps))
        narrow_ms[units] = np.maximum(ms[np.arange(len(units)), home] - shared_ms, 0.0)
        piece_ms[units] = np.maximum(shared_ms.sum(axis=1), 0.0)
        step_ms = (self.whole_ms - narrow_ms) / (self._steps - narrow)[:, None]
        left = np.concatenate([np.arange(steps)[::-1] for steps in self._steps])
        own_ms = np.repeat(self.whole_ms, self._steps, 0) - left[:, None] * np.repeat(
            step_ms, self._steps, 0
        )
        shares = 1.0 - left / np.repeat(self._steps, self._steps)
        return own_ms, np.repeat(piece_ms, self._steps) * (1.0 - shares), shares

    def blocks(self, kind: Blocks) -> tuple[Floats, Floats, float]:
        """Return prices of one kind of row blocks: [U, P] of their ranks, [U] of all ranks.

        The third one is what only the first unit in such blocks costs.
        """
        group = kind.groups.start
        members = self._problem.groups[group].members
        units = np.flatnonzero(kind.possible & (self._is_costly | kind.is_replica))
        ms = self._parts_ms([[Change(u, group)] for u in units.tolist()]) - self._without_ms[units]
        inside_ms = ms[:, members].mean(axis=1)
        if kind.is_global:  # all ranks pay for the exchange alike
            shared_ms = np.zeros_like(inside_ms)
            shared_ms[:, EXCHANGE] = inside_ms[:, EXCHANGE]
        else:
            shared_ms = np.delete(ms, members, axis=1).mean(axis=1)
        first_ms = 0.0
        # Times of small units add up, also under a model that is not quite additive.
        smallest = np.argsort(inside_ms.sum(axis=1), kind="stable")
        together = smallest[self._is_whole[units[smallest]]][:NUM_TOGETHER]
        if len(together) > 1:
            chosen = units[together]
            [all_ms] = self._parts_ms([[Change(u, group) for u in chosen.tolist()]]) - self._base_ms
            np.add.at(all_ms, self._homes[chosen], self.whole_ms[chosen])
            more_ms = (ms[together].sum(axis=0) - all_ms)[members].sum(axis=1).mean()
            first_ms = max(0.0, float(more_ms) / (len(together) - 1))
        own_ms, of_all_ms = self.whole_ms.copy(), np.zeros(len(self._steps))
        own_ms[units] = np.maximum(inside_ms - shared_ms, 0.0)
        of_all_ms[units] = shared_ms.sum(axis=1) - first_ms * kind.is_global
        return own_ms, of_all_ms, first_ms

    def _cut_ms(self, units: Indices, ranks: Indices, widths: Indices) -> Floats:
        """Return [n, W, P], times where ranks [n] have widths [n] of units [n].

        The rest of a unit, if there is any, is on its other rank.
        """
        plans = []
        for unit, rank, width in zip(units.tolist(), ranks.tolist(), widths.tolist(), strict=True):
            rest = int(self._steps[unit]) - width
            pieces = ((rank, width), *([(int(self._others[unit]), rest)] if rest else []))
            plans.append([Change(unit, widths=pieces)])
        return self._parts_ms(plans)

    def _parts_ms(self, plans: Sequence[Sequence[Change]]) -> Floats:
        """Return [n, W, P], times under plans with these changes."""
        return self._predictions.parts_ms([tuple(self._changed(plan)) for plan in plans])

    def _changed(self, plan: Sequence[Change]) -> Iterator[Shard]:
        changed = {
            unit: shards_of_unit(self._problem, unit, group, dict(widths))
            for unit, group, widths in plan
        }
        for unit, shards in enumerate(self._shards):
            yield from changed.get(unit, shards)


def _loads(
    weights: LoadWeights, own_ms: Floats, error: Floats | float
) -> tuple[Floats, Floats, Floats]:
    """Return loads [n, L] of times [n, P], the margin in them, and demands [n, D].

    Args:
        error: [n], share of the computation by which a piece is priced higher.
    """
    own_ms = np.maximum(own_ms, LEAST_MS)
    compute_ms, zeros = own_ms[:, COMPUTE], np.zeros(len(own_ms))
    margin = (compute_ms.T * error).T @ weights.compute
    added = margin + own_ms[:, EXCHANGE] * weights.exchange
    demand = Demand.pack(np.column_stack([compute_ms, zeros, zeros]), zeros, zeros, added)
    return loads_of(own_ms, weights) + margin, margin, demand
