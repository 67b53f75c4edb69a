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

from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.plans.plan import Shard
from dlrm_sharded.search.predictions import COMPUTE_PARTS, EXCHANGE_PART, Predictions, parts_ms
from dlrm_sharded.search.problem import Blocks, Demand, LoadWeights, Problem
from dlrm_sharded.search.state import COLUMNS, State
from dlrm_sharded.search.state_shards import shards_of_unit, unit_shards

COSTLY = 0.02
"""Share of a rank's mean time from which on splits of a unit are priced; others gain nothing."""

NUM_TOGETHER = 8
"""Largest number of units that are laid out alike to find what only the first of them costs."""

LEAST_MS = 1e-6
"""Least time of each part of a piece: the smooth objective needs loads that are not all 0."""

CUTS_AT = (2, 4)
"""A unit is cut at 1/2 and at 1/4 of its columns; prices of other widths are interpolated."""


class Change(NamedTuple):
    """A unit in another layout: on a group, or in column pieces of these widths by rank."""

    unit: int
    group: int = COLUMNS
    widths: tuple[tuple[int, int], ...] = ()


class LayoutPrices(NamedTuple):
    """What a layout of units costs.

    Args:
        own_ms: [n, P], what it adds to a rank that has a part of the unit, not negative.
        shared_ms: [n], what it adds to every rank.
    """

    own_ms: Floats
    shared_ms: Floats


def local_problem(state: State, predictions: Predictions, split_error: float) -> Problem:
    """Return the problem of a state with prices that hold near its plan.

    Args:
        split_error: see `build_problem`.

    Raises:
        TimeoutError: the time is over before all prices are known.
    """
    problem, near = state.problem, _Neighbors(state, predictions)
    loads = _Loads(problem.weights, split_error)
    columns = near.columns()
    is_partial = np.ones(len(columns.own_ms))
    is_partial[problem.whole_shape] = 0.0
    load, margin, demand = loads.of(columns.own_ms, is_partial)
    demand[:, Demand.NUM_SHARDS] = problem.demand[:, Demand.NUM_SHARDS]
    priced = [near.blocks(kind) for kind in problem.blocks]
    # A search needs times that are not negative.
    saved_ms = -np.min([np.zeros(problem.num_units), *(p.shared_ms for p, _ in priced)], axis=0)
    gain_ms = near.whole_ms.sum(axis=1) / problem.world_size
    if problem.replicas is not None:
        replicas, _ = priced[-1]
        gain_ms -= replicas.own_ms.sum(axis=1) + replicas.shared_ms
    return dataclasses.replace(
        problem,
        demand=demand,
        load=load,
        margin=margin,
        shared_ms=columns.shared_ms + near.shares * np.repeat(saved_ms, problem.num_steps),
        blocks=tuple(
            loads.of_blocks(kind, p._replace(shared_ms=p.shared_ms + saved_ms), first_ms)
            for kind, (p, first_ms) in zip(problem.blocks, priced, strict=True)
        ),
        replica_gain_ms=gain_ms,
    )


class _Neighbors:
    """Predicts plans that differ from that of a state in a few units.

    Attributes:
        whole_ms: [U, P], what each whole unit adds to its rank.
        shares: [N], share of its unit's columns that each shape has.
    """

    def __init__(self, state: State, predictions: Predictions) -> None:
        self._problem, self._predictions = state.problem, predictions
        self._steps = state.problem.num_steps.tolist()
        self.shares = np.concatenate([np.arange(1, n + 1) / n for n in self._steps])
        self._shards = [unit_shards(state, unit) for unit in range(state.problem.num_units)]
        self._base_ms = self._parts_ms([()])[0]
        emptiest = np.argsort(self._base_ms.sum(axis=1), kind="stable").tolist()
        # Each unit is tried on two ranks: its own if it has one, and an empty one.
        self._homes = [next(iter(widths), emptiest[0]) for widths in state.widths]
        self._others = [next(rank for rank in emptiest if rank != home) for home in self._homes]
        self._is_whole = [
            widths.get(home) == steps
            for widths, home, steps in zip(state.widths, self._homes, self._steps, strict=True)
        ]
        everyone, pairs = range(len(self._steps)), (self._homes, self._others)
        units = np.array(everyone)
        with_ms = [
            self._parts_ms([[Change(u, widths=((ranks[u], self._steps[u]),))] for u in everyone])
            for ranks in pairs
        ]
        # A rank without the unit is seen where the unit is on the other one.
        self._without_ms = with_ms[0].copy()
        self._without_ms[units, self._homes] = with_ms[1][units, self._homes]
        own_ms = [
            with_unit[units, ranks] - self._without_ms[units, ranks]
            for with_unit, ranks in zip(with_ms, pairs, strict=True)
        ]
        self.whole_ms = np.maximum(np.mean(own_ms, axis=0), 0.0)
        mean_ms = self._base_ms.sum() / len(self._base_ms)
        self._is_costly = self.whole_ms.sum(axis=1) >= COSTLY * mean_ms

    def columns(self) -> LayoutPrices:
        """Return the prices of all column shapes, in the order of the problem's shapes."""
        cuts = [
            Change(unit, widths=((home, steps // at), (other, steps - steps // at)))
            for unit, (home, other) in enumerate(zip(self._homes, self._others, strict=True))
            if self._is_costly[unit]
            for at in CUTS_AT
            if (steps := self._steps[unit]) >= at
        ]
        cut_ms = self._parts_ms([[cut] for cut in cuts])
        points = [{steps: ms} for steps, ms in zip(self._steps, self.whole_ms, strict=True)]
        piece_ms = np.zeros(len(self._steps))  # what all ranks pay for one more piece
        for cut, ms in zip(cuts, cut_ms - self._without_ms[[c.unit for c in cuts]], strict=True):
            (rank, width), (other, _) = cut.widths
            elsewhere_ms = np.delete(ms, [rank, other], axis=0).sum(axis=0)
            shared_ms = elsewhere_ms / max(1, len(ms) - 2)
            points[cut.unit][width] = np.maximum(ms[rank] - shared_ms, 0.0)
            piece_ms[cut.unit] = max(piece_ms[cut.unit], shared_ms.sum())
        return LayoutPrices(
            np.concatenate([_interpolated(of_unit) for of_unit in points]),
            np.repeat(piece_ms, self._steps) * (1.0 - self.shares),
        )

    def blocks(self, kind: Blocks) -> tuple[LayoutPrices, float]:
        """Return the prices of one kind of row blocks, and what only the first of them costs."""
        group = kind.groups.start
        members = self._problem.groups[group].members
        units = np.flatnonzero(kind.possible & (self._is_costly | kind.is_replica)).tolist()
        ms = self._parts_ms([[Change(u, group)] for u in units]) - self._without_ms[units]
        inside_ms, outside_ms = ms[:, members].mean(axis=1), np.delete(ms, members, axis=1)
        if kind.is_global:  # all ranks pay for the exchange alike
            shared_ms = inside_ms * (np.arange(inside_ms.shape[1]) == EXCHANGE_PART)
        else:
            shared_ms = outside_ms.mean(axis=1)
        priced = LayoutPrices(self.whole_ms.copy(), np.zeros(len(self._steps)))
        priced.own_ms[units] = np.maximum(inside_ms - shared_ms, 0.0)
        priced.shared_ms[units] = shared_ms.sum(axis=1)
        first_ms = 0.0
        # Times of small units add up, also under a model that is not quite additive.
        smallest = np.argsort(inside_ms.sum(axis=1), kind="stable").tolist()
        together = [i for i in smallest if self._is_whole[units[i]]][:NUM_TOGETHER]
        if len(together) > 1:
            [with_all_ms] = self._parts_ms([[Change(units[i], group) for i in together]])
            all_ms = with_all_ms - self._base_ms
            for i in together:
                all_ms[self._homes[units[i]]] += self.whole_ms[units[i]]
            more_ms = (ms[together].sum(axis=0) - all_ms)[members].sum(axis=1).mean()
            first_ms = max(0.0, float(more_ms) / (len(together) - 1))
        priced.shared_ms[units] -= first_ms * kind.is_global
        return priced, first_ms

    def _parts_ms(self, plans: Sequence[Sequence[Change]]) -> Floats:
        """Return [n, W, P], times under plans with these changes."""
        costs = self._predictions.costs([tuple(self._changed(plan)) for plan in plans])
        if len(costs) < len(plans):
            raise TimeoutError
        return parts_ms(costs, self._problem.world_size)

    def _changed(self, plan: Sequence[Change]) -> Iterator[Shard]:
        changed = {
            unit: shards_of_unit(self._problem, unit, group, dict(widths))
            for unit, group, widths in plan
        }
        for unit, shards in enumerate(self._shards):
            yield from changed.get(unit, shards)


class _Loads(NamedTuple):
    """Turns parts of times into loads, of which pieces of units have a margin."""

    weights: LoadWeights
    split_error: float

    def of(self, own_ms: Floats, is_partial: Floats) -> tuple[Floats, Floats, Floats]:
        """Return loads [n, L], the margin in them, and demands [n, D], of times [n, P]."""
        own_ms = np.maximum(own_ms, LEAST_MS)
        compute_ms, zeros = own_ms[:, COMPUTE_PARTS], np.zeros(len(own_ms))
        compute_load = compute_ms @ self.weights.compute
        margin = compute_load * (self.split_error * is_partial)[:, None]
        added = margin + own_ms[:, [EXCHANGE_PART]] * self.weights.exchange
        demand = Demand.pack(np.column_stack([compute_ms, zeros]), zeros, zeros, added)
        return compute_load + added, margin, demand

    def of_blocks(self, kind: Blocks, priced: LayoutPrices, first_ms: float) -> Blocks:
        """Return the row blocks with their prices."""
        load, margin, demand = self.of(priced.own_ms, np.ones(len(priced.own_ms)))
        demand[:, Demand.NUM_SHARDS] = kind.demand[:, Demand.NUM_SHARDS]
        return dataclasses.replace(
            kind,
            demand=demand,
            load=load,
            margin=margin,
            shared_ms=priced.shared_ms,
            fixed_ms=first_ms,
            fixed_load=first_ms * self.weights.exchange * (not kind.is_global),
        )


def _interpolated(points: dict[int, Floats]) -> Floats:
    """Return [steps, P], prices of all widths of a unit, given those of some."""
    widths = sorted(points)
    known = np.array([points[width] for width in widths])
    # Without a cut that was priced, a part costs as much as the whole.
    slope = 0.0 if len(widths) == 1 else (known[1] - known[0]) / (widths[1] - widths[0])
    at_zero = np.clip(known[0] - widths[0] * slope, 0.0, known[0])
    wanted, known = np.arange(1, widths[-1] + 1), np.vstack([at_zero, known])
    return np.column_stack([np.interp(wanted, [0, *widths], part) for part in known.T])
