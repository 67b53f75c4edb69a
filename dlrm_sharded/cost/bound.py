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

import math

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.cost.communication import ExchangePrices
from dlrm_sharded.cost.features import Floats
from dlrm_sharded.cost.learned import LearnedCostModel, with_profiles
from dlrm_sharded.cost.shapes import Pieces, RowBlocks, Shapes
from dlrm_sharded.task import ShardingTask

NUM_HALVINGS = 20


def lower_bound_ms(task: ShardingTask, model: LearnedCostModel) -> float:
    """No plan that `validate` accepts is predicted a lower cost; inf where no plan fits at all."""
    return _Relaxation(with_profiles(task), model).bound_ms()


class _Relaxation:
    """Plans whose pieces go anywhere, in any parts."""

    def __init__(self, task: ShardingTask, model: LearnedCostModel) -> None:
        self._world_size = task.topology.world_size
        self._capacity = max(task.topology.rank_memory_bytes)
        self._compute = model.compute
        self._launch_ms = float(model.compute.launch_ms(np.ones(1)).sum())
        self._shapes = shapes = Shapes.of(task, model.compute)
        hosts = model.hosts(task.topology)
        self._prices = prices = ExchangePrices.of(model.communication, hosts)
        # what each rank pays at least for a byte of any rank: a subgradient of its time, which is
        # convex and homogeneous, where volumes are even
        self._floor = min(prices.even / self._world_size, prices.of_any_rank)
        volume = shapes.columns.volume
        self._share = volume / volume[shapes.whole][shapes.table]
        self._column_work = self._work_ms(shapes.columns)
        self._column_comm = shapes.columns.volume * (prices.even / self._world_size) + prices.shard
        self._blocks = [b for b in (shapes.rows, shapes.host_rows) if b is not None]
        self._block_comm = [self._comm_of_blocks(blocks) for blocks in self._blocks]

    def bound_ms(self) -> float:
        """The least of plans without row blocks, with both kinds of tables, with row blocks only.

        What an exchange takes whatever it exchanges is paid by those that have it.
        """
        fixed_ms, reduce_ms = self._prices.fixed, self._prices.reduce_fixed
        if len(self._blocks) > 1:  # the ranks of one host may be all that reduce
            reduce_ms = min(reduce_ms, self._prices.host_reduce_fixed / self._prices.num_hosts)
        return min(
            self._bound_ms(fixed_ms, columns=True, rows=False),
            self._bound_ms(fixed_ms + reduce_ms, columns=True, rows=True),
            self._bound_ms(reduce_ms, columns=False, rows=True),
        )

    def _bound_ms(self, fixed_ms: float, *, columns: bool, rows: bool) -> float:
        """The largest cost that plans of these kinds of tables do not undercut."""
        low = self._mean_ms(math.inf, fixed_ms, columns=columns, rows=rows)
        if low == math.inf:
            return low
        high = max(low, 1e-6)
        while self._mean_ms(high, fixed_ms, columns=columns, rows=rows) > high:
            low, high = high, 2.0 * high
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2
            if self._mean_ms(middle, fixed_ms, columns=columns, rows=rows) > middle:
                low = middle
            else:
                high = middle
        return low

    def _mean_ms(self, limit_ms: float, fixed_ms: float, *, columns: bool, rows: bool) -> float:
        """A lower bound of the ranks' mean cost in plans that cost `limit_ms` or less.

        inf where there is no such plan.
        """
        prices, num_tables = self._prices, len(self._shapes.step)
        any_rank_ms = fixed_ms + self._least_comm_ms(columns=columns, rows=rows)
        least = np.full(num_tables, np.inf)
        least_work = np.full(num_tables, np.inf)

        def fits(pieces: Pieces, work_ms: Floats) -> NDArray[np.bool_]:
            alone_ms = work_ms + prices.own * pieces.volume + self._launch_ms + any_rank_ms
            within: NDArray[np.bool_] = (alone_ms <= limit_ms) & (
                pieces.size_bytes <= self._capacity
            )
            return within

        if columns:
            pieces, work_ms = self._shapes.columns, self._column_work
            allowed = fits(pieces, work_ms)
            of_table = self._shapes.first[:-1]
            for least_of, ms in (
                (least, work_ms / self._world_size + self._column_comm),
                (least_work, work_ms),
            ):
                whole_ms = np.where(allowed, ms / self._share, np.inf)
                np.minimum(least_of, np.minimum.reduceat(whole_ms, of_table), out=least_of)
        if rows:
            for blocks, comm_ms in zip(self._blocks, self._block_comm, strict=True):
                block_ms = self._work_ms(blocks.block)
                allowed = blocks.possible & fits(blocks.block, block_ms)
                work_ms = (blocks.num_blocks - 1) * block_ms + self._work_ms(blocks.last)
                ms = np.where(allowed, work_ms / self._world_size + comm_ms, np.inf)
                np.minimum(least, ms, out=least)
                np.minimum(least_work, np.where(allowed, work_ms, np.inf), out=least_work)
        mean_ms = float(least.sum()) + fixed_ms
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

    def _comm_of_blocks(self, blocks: RowBlocks) -> Floats:
        """[T], what the exchanges of a table in row blocks take, in the mean over ranks."""
        prices, share = self._prices, blocks.num_blocks / self._world_size
        if blocks.num_blocks == self._world_size:
            reduce_ms = prices.reduce * blocks.reduce_volume + prices.reduce_shard
        else:
            reduce_ms = prices.host_reduce * blocks.reduce_volume + prices.host_reduce_shard
            reduce_ms = reduce_ms + blocks.block.volume * prices.even
        return reduce_ms * share

    def _least_comm_ms(self, *, columns: bool, rows: bool) -> float:
        """What every rank pays at least for the volumes of all tables."""
        least = np.full(len(self._shapes.step), np.inf)
        if columns:
            least = self._floor * self._shapes.columns.volume[self._shapes.whole]
        if rows:
            for blocks, comm_ms in zip(self._blocks, self._block_comm, strict=True):
                of_table = comm_ms
                if blocks.num_blocks < self._world_size:  # only the ranks of one host reduce
                    of_table = self._floor * blocks.block.volume * blocks.num_blocks
                least = np.minimum(least, np.where(blocks.possible, of_table, np.inf))
        return float(least[np.isfinite(least)].sum())
