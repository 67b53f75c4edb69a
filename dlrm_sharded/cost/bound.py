"""A lower bound of `PlanCost.cost_ms` over all plans of a task, under an additive cost model.

The slowest rank costs no less than the ranks do on average (L1), and that mean is nearly a sum over
the pieces into which the tables are cut, wherever these go (L2, L3). So every table can take its
cheapest pieces by itself (L4). The further lemmas take account of what a single large piece, a cost
that all ranks have, row blocks, sequences and launches add to the mean.

docs/notes/lower_bound.md has the lemmas L1 to L16, their proofs and an example with numbers.

Letters: T tables, n sizes of pieces, L layouts of a kind of plans, W ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.plan_kinds import CutCosts, Cuts, PlanKind, by_loaded_table, least_of_layouts
from dlrm_sharded.cost.workload import Floats, Mask, owners

NUM_BISECTIONS = 20
"""Steps of the bisection, which leave an interval of 2 ** -20 of the bound."""

LEAST_MS = 1e-6
"""Lowest cost, in ms, at which the search for an upper end of the interval starts."""

LOADED_SHARE = 0.1
"""Row blocks on one host get a test if they take a rank this share of the ranks' mean or more."""

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
HOST_WEIGHTS = np.array(list(itertools.product(sorted((*_SHARES, 0.1)), _SHARES)))
"""[C, 2], weights of the work and of the volumes on a host that has a table's row blocks.

At 0, work on the host weighs as much as work elsewhere; at 1, no other work counts. Volumes on the
host do not count at 0, and weigh as much as elsewhere at 1.
"""

FAR_MS = 1e300
"""Stands in for inf where that would be multiplied by 0."""

LEAST_SPARE_MS = 1e-9
"""Keeps the time that a rank has for its work above zero."""

RANGES_PER_OCTAVE, NUM_OCTAVES = 16, 4
"""Number of ranges of what every rank pays in an octave, a factor of 2 in time, and number of
octaves below the limit."""

WEIGHTS = np.array([*np.arange(-10, 10) / 10, 1.0, 1.5, 2.0, 3.0, 4.0])
"""Weights of what every rank pays, in addition to the mean over ranks, in the test of a range."""


def lower_bound_ms(costed: CostedTask, *, replicas: bool = True) -> float:
    """Return a lower bound of all valid plans' costs, or inf if it is certain that no plan fits.

    Args:
        replicas: whether plans may replicate tables; without replicas, the bound is no lower.
    """
    return _relaxed(costed).bound_ms(replicas=replicas)


@functools.lru_cache(maxsize=8)
def _relaxed(costed: CostedTask) -> Relaxation:
    """Return the relaxed task; cached because the search and the report of a run both need it."""
    return Relaxation(costed)


class Relaxation:
    """A relaxed task, in which fractions of pieces may go anywhere, so that no plan is cheaper."""

    def __init__(self, costed: CostedTask) -> None:
        topology, cut_costs = costed.task.topology, CutCosts(costed)
        self._world_size = topology.world_size
        self._too_large = costed.task.table_bytes > sum(topology.rank_memory_bytes)
        self._all_to_all_ms = cut_costs.exchange_costs.fixed_ms
        self._busiest_byte_ms = cut_costs.least_costs.busiest_byte_ms
        self._cuts = cut_costs.cuts()
        self._num_modules = int(owners(costed.task.tables).max()) + 1
        most_launches = max(len(self._cuts), self._num_modules)
        launch_ms = costed.compute.launch_ms(np.arange(most_launches + 1.0))
        self._launch_ms: list[float] = launch_ms.sum(axis=1).tolist()

    def bound_ms(self, *, replicas: bool = True) -> float:
        """Return the lower bound of all plans, or of those without replicas."""
        if self._too_large:
            return math.inf
        bound_ms, kinds = math.inf, self.kinds(replicas=replicas)
        # Kinds with a low mean come first, because the others then need only one test.
        for kind in sorted(kinds, key=lambda kind: self.mean_ms(math.inf, kind)):
            bound_ms = self.bound_of_kind_ms(kind, enough_ms=bound_ms)
        return bound_ms

    def kinds(self, *, replicas: bool = True) -> list[PlanKind]:
        """Return the kinds of plans for each set of layouts that tables can have."""
        cuts = [layout for layout in self._cuts if replicas or layout.layout != "replicas"]
        cuts = [layout for layout in cuts if layout.possible.any()]
        kinds: list[PlanKind] = []
        for number in range(1, len(cuts) + 1):
            for some in itertools.combinations(cuts, number):
                mean_ms = self.mean_ms(math.inf, PlanKind(some, self._all_to_all_ms))
                if mean_ms < math.inf:
                    least_ms = LOADED_SHARE * mean_ms
                    kinds += by_loaded_table(some, self._all_to_all_ms, least_ms, self._num_modules)
        return kinds

    def bound_of_kind_ms(self, kind: PlanKind, *, enough_ms: float = math.inf) -> float:
        """Return the largest lower bound found for the costs of a kind's plans (L5).

        Args:
            enough_ms: the largest bound that is of use; a higher one is cut to it.
        """
        low = self.mean_ms(math.inf, kind)
        if low >= enough_ms or (enough_ms < math.inf and self.exceeds(enough_ms, kind)):
            return enough_ms
        # `low` is M(inf) or has passed the test, so the end that the bisection returns is a bound
        high = max(low, LEAST_MS)
        while high < enough_ms and self.exceeds(high, kind):
            low, high = high, 2.0 * high
        high = min(high, enough_ms)
        for _ in range(NUM_BISECTIONS):
            middle = (low + high) / 2
            if self.exceeds(middle, kind):
                low = middle
            else:
                high = middle
        return low

    def exceeds(self, limit_ms: float, kind: PlanKind) -> bool:
        """Return whether it is certain that all plans of a kind cost more than a limit (L5)."""
        if self.mean_ms(limit_ms, kind) > limit_ms:
            return True
        return kind.has_free_pieces and all(
            self.excludes(limit_ms, kind, least_ms, most_ms)
            for least_ms, most_ms in _ranges(kind.least_ms, limit_ms)
        )

    def mean_ms(self, limit_ms: float, kind: PlanKind) -> float:
        """Return a lower bound of the ranks' mean cost in plans that cost `limit_ms` or less.

        It is inf if there is no such plan.
        """
        allowed, next_ms = self._allowed(limit_ms, kind), self._next_launch_ms(kind)
        sum_ms = float(least_of_layouts(self._means_ms(allowed, kind, 0.0))[0])
        if sum_ms == math.inf or next_ms == 0.0:
            return sum_ms + self._fixed_ms(kind)
        # Ranks that hold pieces launch a lookup, and few of them cannot do all the work (L6).
        spare_ms = max(limit_ms - self._launches_ms(kind) - kind.least_ms, LEAST_SPARE_MS)
        num_used = math.ceil(self._free_work_ms(allowed, kind) / spare_ms)
        ceiled_ms = sum_ms + next_ms * min(num_used / self._world_size, 1.0)
        shared_ms, _ = least_of_layouts(self._means_ms(allowed, kind, next_ms / spare_ms))
        return max(ceiled_ms, float(shared_ms)) + self._fixed_ms(kind)

    def excludes(self, limit_ms: float, kind: PlanKind, least_ms: float, most_ms: float) -> bool:
        """Return whether no plan that costs the limit or less is within a range (L11).

        Args:
            least_ms, most_ms: what every rank pays in plans of the range, launches aside.
        """
        spare_ms = limit_ms - self._launches_ms(kind) - least_ms
        if spare_ms <= 0.0:
            return True
        allowed = self._allowed(limit_ms, kind, least_ms, most_ms)
        means_ms = self._means_ms(allowed, kind, self._next_launch_ms(kind) / spare_ms)
        every_rank_ms = np.where(means_ms < np.inf, kind.every_rank_ms, 0.0)
        if kind.loaded is not None and self._is_uneven(limit_ms, kind, allowed, least_ms, most_ms):
            return True
        sums_ms, _ = least_of_layouts(means_ms + WEIGHTS[:, None, None] * every_rank_ms)
        sums_ms += self._fixed_ms(kind) + WEIGHTS * kind.every_rank_fixed_ms
        edges_ms = np.where(WEIGHTS > 0.0, most_ms, least_ms)
        return bool((sums_ms > limit_ms + WEIGHTS * edges_ms).any())

    def _is_uneven(
        self,
        limit_ms: float,
        kind: PlanKind,
        allowed: Sequence[Mask],
        least_ms: float,
        most_ms: float,
    ) -> bool:
        """Return whether the loaded host's row blocks exclude all plans within a range (L12).

        Work and volumes on the ranks of this host have their own weights.
        """
        costs = (self._weighed_ms(limit_ms - least_ms, kind, *item) for item in enumerate(allowed))
        costs_ms = np.stack([*costs], axis=1)
        spare_ms = limit_ms - self._launches_ms(kind)
        every_rank_ms = np.where(costs_ms < np.inf, kind.every_rank_ms, 0.0)
        for weight in WEIGHTS.tolist():
            weighed_ms = (costs_ms + weight * every_rank_ms).min(axis=1).sum(axis=1)
            weighed_ms += (1.0 + weight) * kind.every_rank_fixed_ms
            if weighed_ms.max() > spare_ms + weight * (most_ms if weight > 0.0 else least_ms):
                return True
        return False

    def _weighed_ms(self, left_ms: float, kind: PlanKind, place: int, allowed: Mask) -> Floats:
        """Return [C, T], the least time of the tables in one layout for each of `HOST_WEIGHTS`.

        Args:
            left_ms: what every rank has left for its launches and pieces.
            place: index of the layout.
            allowed: [n], pieces that ranks without row blocks of the loaded table may have.
        """
        layout, launched = kind.cuts[place], kind.num_on_all_ranks + 1
        (in_rows,) = (cuts for cuts in kind.cuts if cuts.layout == "host_rows")
        assert kind.loaded is not None
        share = in_rows.group_size / self._world_size
        # weights [C, 1] are 1 in the mean over ranks
        work, volume = HOST_WEIGHTS.T[:, :, None]
        work = 1.0 + work * (1.0 / share - 1.0)
        other_work, other_volume = ((1.0 - share * w) / (1.0 - share) for w in (work, volume))
        if layout.is_on_all_ranks:
            every_rank_ms = layout.least(layout.every_rank_ms, allowed)
            # The last block of a sequence may be on a rank that weighs more, and has less volume.
            missing = layout.group_size * layout.piece_volume - layout.volume
            missing_ms = self._busiest_byte_ms / self._world_size * missing
            return every_rank_ms - (other_volume - 1.0) * missing_ms
        loaded_ms, fixed_ms = float(in_rows.piece_ms[kind.loaded]), in_rows.fixed_ms / share
        piece_ms, work_ms, next_ms = layout.piece_ms, layout.work_ms, 0.0
        if layout is in_rows:  # the ranks of the loaded host have paid the fixed costs
            piece_ms = piece_ms - fixed_ms
            work_ms = in_rows.group_size * piece_ms
        else:  # and they launch one more lookup for columns
            next_ms = self._launch_ms[launched + 1] - self._launch_ms[launched]
        spare_ms = left_ms - self._launch_ms[launched] - loaded_ms - next_ms
        with_blocks_ms = np.full(len(layout.first), np.inf)
        if spare_ms > 0.0:
            fits = allowed & (piece_ms <= spare_ms)
            with_blocks_ms = layout.least(work_ms * (1.0 + next_ms / spare_ms), fits)
        byte_ms = self._busiest_byte_ms * layout.volume
        with_blocks_ms = _times(work, with_blocks_ms) + volume * byte_ms
        if layout is in_rows:
            with_blocks_ms[:, [kind.loaded]] = (
                work * in_rows.group_size * loaded_ms + volume * byte_ms[kind.loaded]
            )
        elsewhere_ms = _times(other_work, layout.least(work_ms, allowed)) + other_volume * byte_ms
        if layout is in_rows:
            elsewhere_ms[:, kind.loaded] = np.inf
        costs_ms = np.minimum(with_blocks_ms, elsewhere_ms) - byte_ms
        return costs_ms / self._world_size + layout.every_rank_ms

    def _allowed(
        self, limit_ms: float, kind: PlanKind, least_ms: float = 0.0, most_ms: float = math.inf
    ) -> list[Mask]:
        """Return [n] for each layout of a kind: which pieces plans may have within `limit_ms`.

        Excluded are pieces that take their rank beyond the limit with what every rank pays (L5),
        and pieces for which all other ranks would wait beyond it (L13).

        Args:
            least_ms, most_ms: what every rank pays in these plans, launches aside.
        """
        if limit_ms == math.inf:
            return [layout.possible for layout in kind.cuts]
        allowed = []
        for layout, own_ms in zip(kind.cuts, kind.own_ms, strict=True):
            paid_ms = np.where(own_ms > most_ms, np.inf, np.maximum(own_ms, least_ms))
            needed_ms = layout.piece_ms + paid_ms[layout.table] + self._launch_ms_with(kind, layout)
            allowed.append(layout.possible & (needed_ms <= limit_ms))
        # All ranks wait for the largest volume, which is no less than that of a piece (L13).
        byte_ms = self._busiest_byte_ms
        apart_ms = []
        for layout, mask, every_rank_ms in zip(kind.cuts, allowed, kind.every_rank_ms, strict=True):
            is_any = np.logical_or.reduceat(mask, layout.first)
            waited_ms = byte_ms / self._world_size * layout.volume
            apart_ms.append(np.where(is_any, every_rank_ms - waited_ms, np.inf))
        sum_ms, excess_ms = least_of_layouts(np.stack(apart_ms))
        if sum_ms == math.inf:
            return [np.zeros_like(mask) for mask in allowed]
        least_apart_ms = kind.every_rank_fixed_ms + float(sum_ms)
        excess_ms -= excess_ms.min(axis=1, keepdims=True)
        for layout, mask, over_ms in zip(kind.cuts, allowed, excess_ms, strict=True):
            alone_ms = layout.piece_ms + byte_ms * layout.piece_volume + over_ms[layout.table]
            mask &= least_apart_ms + self._launch_ms_with(kind, layout) + alone_ms <= limit_ms
        return allowed

    def _means_ms(self, allowed: Sequence[Mask], kind: PlanKind, work_launch: float) -> Floats:
        """Return [L, T], the least mean over ranks of each table in each layout; inf without any.

        Args:
            work_launch: launch time, in ms, per ms of work on ranks that have no other lookup.
        """
        means_ms = []
        for layout, mask in zip(kind.cuts, allowed, strict=True):
            launch = 0.0 if layout.is_on_all_ranks else work_launch / self._world_size
            means_ms.append(layout.least(layout.mean_ms + layout.work_ms * launch, mask))
        return np.stack(means_ms)

    def _free_work_ms(self, allowed: Sequence[Mask], kind: PlanKind) -> float:
        """Return the least work, in ms, of the tables that cannot be on all ranks."""
        works_ms = np.stack(
            [
                layout.least(0.0 if layout.is_on_all_ranks else layout.work_ms, mask)
                for layout, mask in zip(kind.cuts, allowed, strict=True)
            ]
        )
        return float(works_ms.min(axis=0).sum())

    def _launches_ms(self, kind: PlanKind) -> float:
        """Return the launch time of a rank with free pieces, or of any rank if there are none."""
        return self._launch_ms[kind.num_on_all_ranks + kind.has_free_pieces]

    def _launch_ms_with(self, kind: PlanKind, layout: Cuts) -> float:
        """Return the launch time of a rank that has a piece of a layout.

        A rank whose piece is on all ranks may have no free piece.
        """
        return self._launch_ms[kind.num_on_all_ranks + (not layout.is_on_all_ranks)]

    def _next_launch_ms(self, kind: PlanKind) -> float:
        """Return the launch time that free pieces add to a rank."""
        return self._launches_ms(kind) - self._launch_ms[kind.num_on_all_ranks]

    def _fixed_ms(self, kind: PlanKind) -> float:
        """Return the fixed costs in the ranks' mean, with the launches that all ranks have."""
        return kind.fixed_ms + self._launch_ms[kind.num_on_all_ranks]


def _times(weights: Floats, values: Floats) -> Floats:
    """Return weights times values; infinite values stay infinite."""
    return np.where(values < np.inf, weights * np.minimum(values, FAR_MS), np.inf)


def _ranges(least_ms: float, limit_ms: float) -> Iterator[tuple[float, float]]:
    """Yield ranges from `least_ms` to the limit, narrow ones in the octaves below the limit.

    No edge depends on tables, and a higher limit leaves fewer edges below it, so neither fewer
    tables nor a higher limit make more provable.
    """
    last = math.ceil(RANGES_PER_OCTAVE * math.log2(limit_ms))
    for edge in range(last - NUM_OCTAVES * RANGES_PER_OCTAVE, last + 1):
        edge_ms = 2.0 ** (edge / RANGES_PER_OCTAVE)
        if edge_ms > least_ms:
            yield least_ms, edge_ms
            least_ms = edge_ms
