"""How cheap any plan of a task could be: a lower bound of `PlanCost.cost_ms` under a cost model.

The slowest rank costs no less than the ranks do in the mean, and the mean is nearly a sum over the
pieces into which the tables are cut, wherever these go:

- The work of a piece costs least on a rank that reads nothing else in the step.
- Exchanges cost least, in the mean over ranks, where the ranks' volumes are even, as their times
  are convex functions that do not depend on a rank's number (Jensen's inequality).

So every table takes its cheapest pieces by itself, columns or blocks of rows. A piece that alone
makes a rank cost more than T is in no plan of cost T. The bound is the largest T that the cheapest
of the other pieces do not undercut. It bounds the critical path too, which is never below the cost.

Letters: T tables, N column shapes, W ranks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.base import AdditiveCostModel
from dlrm_sharded.cost.communication import (
    EXCHANGE_TERMS,
    EXCHANGES,
    CommunicationModel,
    ExchangePrices,
    Hosts,
    ReducePrices,
)
from dlrm_sharded.cost.features import Floats
from dlrm_sharded.cost.shapes import BlockShapes, Pieces, Shapes
from dlrm_sharded.profiles import with_profiles
from dlrm_sharded.task import ShardingTask

NUM_HALVINGS = 20


@functools.lru_cache(maxsize=8)
def lower_bound_ms(task: ShardingTask, model: AdditiveCostModel) -> float:
    """Return a cost that no plan which `validate` accepts undercuts; inf where surely none fits.

    Cached, as the search and the report of one run both ask for it.
    """
    return _Relaxation(with_profiles(task), model).bound_ms()


@dataclass(frozen=True, slots=True)
class _Kind:
    """Which shapes the tables of a plan have.

    Args:
        columns: whether there are column shards.
        blocks: kinds of row blocks that there are.
        fixed_ms: time of exchanges that does not depend on volumes, in the mean over ranks.
        any_fixed_ms: likewise, what every rank pays at least.
    """

    columns: bool
    blocks: tuple[BlockShapes, ...]
    fixed_ms: float
    any_fixed_ms: float


class _Relaxation:
    """Plans whose pieces go anywhere, in any parts."""

    def __init__(self, task: ShardingTask, model: AdditiveCostModel) -> None:
        self._world_size = task.topology.world_size
        memory = task.topology.rank_memory_bytes
        self._capacity, self._too_large = max(memory), task.table_bytes > sum(memory)
        self._compute = model.compute
        self._launch_ms = float(model.compute.launch_ms(np.ones(1)).sum())
        self._shapes = shapes = Shapes.of(task, model.compute)
        hosts = model.hosts(task.topology)
        self._prices = prices = ExchangePrices.of(model.communication, hosts)
        self._own, self._floor = _least_exchange_prices(model.communication, hosts)
        volume = shapes.columns.volume
        self._share = volume / volume[shapes.whole][shapes.table]
        self._column_work = self._work_ms(shapes.columns)
        self._column_comm = shapes.columns.volume * (prices.even / self._world_size) + prices.shard

    def bound_ms(self) -> float:
        """The least of plans without row blocks, of row blocks on all ranks only, and of others.

        What an exchange takes whatever it exchanges is paid by those that have it.
        """
        if self._too_large:
            return math.inf
        fixed_ms, blocks = self._prices.fixed, self._shapes.row_blocks
        kinds = [_Kind(True, (), fixed_ms, fixed_ms)]
        if blocks:
            everywhere, *_ = blocks
            reduce_ms = self._reduce(everywhere).fixed_ms
            least_ms = min(self._reduce(kind).fixed_ms / kind.num_groups for kind in blocks)
            # only the ranks of one group may reduce at all
            any_ms = reduce_ms if len(blocks) == 1 else 0.0
            kinds += [
                _Kind(False, (everywhere,), reduce_ms, reduce_ms),
                _Kind(True, blocks, fixed_ms + least_ms, fixed_ms + any_ms),
            ]
        return min(self._bound_ms(kind) for kind in kinds)

    def _bound_ms(self, kind: _Kind) -> float:
        """The largest cost that plans of a kind do not undercut."""
        low = self._mean_ms(math.inf, kind)
        if low == math.inf:
            return low
        high = max(low, 1e-6)
        while self._mean_ms(high, kind) > high:
            low, high = high, 2.0 * high
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2
            if self._mean_ms(middle, kind) > middle:
                low = middle
            else:
                high = middle
        return low

    def _mean_ms(self, limit_ms: float, kind: _Kind) -> float:
        """A lower bound of the ranks' mean cost in plans that cost `limit_ms` or less.

        inf where there is no such plan.
        """
        num_tables = len(self._shapes.step)
        any_rank_ms = kind.any_fixed_ms + self._least_comm_ms(kind)
        least = np.full(num_tables, np.inf)
        least_work = np.full(num_tables, np.inf)

        def fits(pieces: Pieces, work_ms: Floats) -> NDArray[np.bool_]:
            alone_ms = work_ms + self._own * pieces.volume + self._launch_ms + any_rank_ms
            within: NDArray[np.bool_] = (alone_ms <= limit_ms) & (
                pieces.size_bytes <= self._capacity
            )
            return within

        if kind.columns:
            pieces, work_ms = self._shapes.columns, self._column_work
            allowed = fits(pieces, work_ms)
            of_table = self._shapes.first[:-1]
            for least_of, ms in (
                (least, work_ms / self._world_size + self._column_comm),
                (least_work, work_ms),
            ):
                whole_ms = np.where(allowed, ms / self._share, np.inf)
                np.minimum(least_of, np.minimum.reduceat(whole_ms, of_table), out=least_of)
        for blocks in kind.blocks:
            block_ms = self._work_ms(blocks.block)
            allowed = blocks.possible & fits(blocks.block, block_ms)
            work_ms = (blocks.group_size - 1) * block_ms + self._work_ms(blocks.last)
            comm_ms = self._comm_of_blocks(blocks)
            ms = np.where(allowed, work_ms / self._world_size + comm_ms, np.inf)
            np.minimum(least, ms, out=least)
            np.minimum(least_work, np.where(allowed, work_ms, np.inf), out=least_work)
        mean_ms = float(least.sum()) + kind.fixed_ms
        if mean_ms == math.inf or limit_ms == math.inf:
            return mean_ms
        # ranks that hold anything launch a lookup; few of them cannot do all the work
        room_ms = max(limit_ms - self._launch_ms - any_rank_ms, 1e-9)
        num_used = min(math.ceil(float(least_work.sum()) / room_ms), self._world_size)
        return mean_ms + self._launch_ms * num_used / self._world_size

    def _work_ms(self, pieces: Pieces) -> Floats:
        """[n], of computation on a rank that reads nothing else."""
        work: Floats = self._compute.work_ms(pieces.vectors, pieces.vectors[:, -1]).sum(axis=1)
        return work

    def _reduce(self, blocks: BlockShapes) -> ReducePrices:
        return self._prices.reduces[blocks.group_size]

    def _comm_of_blocks(self, blocks: BlockShapes) -> Floats:
        """[T], what the exchanges of a table in row blocks take, in the mean over ranks."""
        prices = self._reduce(blocks)
        reduce_ms = prices.byte_ms * blocks.reduce_volume + prices.shard_ms
        return (reduce_ms + blocks.block.volume * self._prices.even) / blocks.num_groups

    def _least_comm_ms(self, kind: _Kind) -> float:
        """What every rank pays at least for the volumes of all tables."""
        least = np.full(len(self._shapes.step), np.inf)
        if kind.columns:
            least = self._floor * self._shapes.columns.volume[self._shapes.whole]
        for blocks in kind.blocks:
            of_table = self._comm_of_blocks(blocks)
            if not blocks.is_global:  # ranks outside the group do not reduce
                of_table = self._floor * blocks.block.volume * blocks.group_size
            least = np.minimum(least, np.where(blocks.possible, of_table, np.inf))
        return float(least[np.isfinite(least)].sum())


def _least_exchange_prices(model: CommunicationModel, hosts: Hosts) -> tuple[float, float]:
    """What a rank's exchanges take at least: for a byte of its own, for one of any rank.

    A maximum over ranks or hosts is no less than the mean over them. What a rank gets from others
    may be nothing, but where all others are behind one link: there it is what is not its own.
    """
    if hosts.world_size == 1:
        return 0.0, 0.0
    links = (
        ("intra", hosts.ranks_per_host - 1, hosts.intra_ms_per_mb),
        ("inter", hosts.world_size - hosts.ranks_per_host, hosts.inter_ms_per_mb),
    )
    num_hosts = hosts.world_size // hosts.ranks_per_host
    own = of_any = 0.0
    for kind, of_own, of_others in (("fwd_comm", "out", "in"), ("bwd_comm", "in", "out")):
        weights = model.exchange[EXCHANGES.index(kind)].tolist()
        weight = dict(zip(EXCHANGE_TERMS, weights, strict=True))
        own += weight["own_bytes"] * hosts.world_size
        of_any += weight["all_bytes"]
        for link, peers, ms_per_mb in links:
            own += (weight[f"{of_own}_{link}"] + weight[f"busier_{link}"]) * peers * ms_per_mb
            maxima = sum(weight[f"max_{term}_{link}"] for term in ("out", "in", "busier"))
            maxima = (maxima + weight["max_both_links"]) / hosts.world_size
            of_any += (maxima + weight[f"host_{link}"] / num_hosts) * peers * ms_per_mb
            if peers == hosts.world_size - 1:
                own -= weight[f"{of_others}_{link}"] * ms_per_mb
                of_any += weight[f"{of_others}_{link}"] * ms_per_mb
    return max(own, 0.0) / 1e6, (of_any + min(own, 0.0)) / 1e6
