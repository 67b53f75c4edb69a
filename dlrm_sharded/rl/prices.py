"""Costs of ranks by a run's cost model, for policies that were trained on other hardware.

A policy reads costs that its cost network predicts for the hardware of its training. The costs of
other hardware take their place: those of an additive cost model, under which every table adds a
vector to its rank, as it does under the network. Costs that no placement of whole tables changes
are left out, as are constants of the networks: launches, latencies, and what all ranks pay for a
byte of any rank.

Letters: E episodes, T tables, K numbers of a table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlrm_sharded.cost.base import PricedTask
from dlrm_sharded.cost.communication import CommunicationModel, Hosts
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.exchange_prices import ExchangePrices
from dlrm_sharded.cost.workload import Floats, Workload, workload_of_tables


@dataclass(frozen=True, slots=True)
class RankPrices:
    """Prices ranks with given tables on some hardware.

    A table's vector has the numbers of `ComputeModel.vectors`, and last the bytes of pooled vectors
    that its rank exchanges with every other rank.

    Args:
        own_byte_ms, busiest_byte_ms: time of such a byte of the rank itself and of the busiest
            rank, in both exchanges of a step.
        sequences: what bytes of sequences count for, see `ExchangePrices`.
    """

    compute: ComputeModel
    own_byte_ms: float
    busiest_byte_ms: float
    sequences: Sequence[float] = (1.0, 1.0)

    @classmethod
    def from_model(
        cls, compute: ComputeModel, communication: CommunicationModel, hosts: Hosts
    ) -> RankPrices:
        """Take the prices of exchanges near even volumes, see `ExchangePrices`."""
        if hosts.world_size == 1:
            return cls(compute, 0.0, 0.0)
        prices = ExchangePrices.from_model(communication, hosts)
        # the busiest rank is on the busiest host, so a byte there counts for both
        busiest_byte_ms = prices.busiest_rank_byte_ms + prices.busiest_host_byte_ms
        return cls(compute, prices.own_byte_ms, busiest_byte_ms, prices.sequences)

    def vectors(self, workload: Workload, world_size: int) -> Floats:
        """Return [T, K], the vectors of whole tables, see `workload_of_tables`."""
        # the workload is of one rank, which would exchange all of its vectors with itself
        volume = workload.vector_bytes(self.sequences) / world_size
        return np.column_stack([self.compute.vectors(workload), volume])


@dataclass(frozen=True, slots=True)
class TablePrices:
    """The prices of tasks on one hardware, in the place of a cost network.

    Args:
        vectors: [E, T, K], of the tasks' tables.
        unit_ms: [E], milliseconds per unit of each task's costs.
    """

    prices: RankPrices
    vectors: Tensor
    unit_ms: Tensor

    @classmethod
    def from_vectors(cls, prices: RankPrices, vectors: Sequence[Floats]) -> TablePrices:
        """Build the prices of tasks from the vectors [T, K] of each, in milliseconds."""
        stacked = torch.tensor(np.stack(vectors), dtype=torch.float64)
        return cls(prices, stacked, torch.ones(len(stacked), dtype=torch.float64))

    @classmethod
    def from_task(cls, priced: PricedTask) -> TablePrices:
        """Build the prices of one task."""
        prices = RankPrices.from_model(priced.compute, priced.communication, priced.hosts)
        workload = workload_of_tables(priced.task.tables, priced.task.batch_size)
        vectors = prices.vectors(workload, priced.task.topology.world_size)
        return cls.from_vectors(prices, [vectors])

    def select(self, episodes: Tensor) -> TablePrices:
        """Return the prices of the tasks of the episodes [N]."""
        return TablePrices(self.prices, self.vectors[episodes], self.unit_ms[episodes])

    def reorder(self, order: Tensor) -> TablePrices:
        """Return the prices with the tables in the order [E, T]."""
        index = order[..., None].expand_as(self.vectors)
        return dataclasses.replace(self, vectors=self.vectors.gather(1, index))

    def with_mean(self, costs: Tensor) -> TablePrices:
        """Return the prices in units in which tables cost [E] alone on a rank in the mean.

        So a policy reads costs of the size that it was trained on, and its plans do not change if
        all prices are scaled.
        """
        mean = self.rank_costs(self.vectors, self.vectors).sum(dim=-1).mean(dim=1)
        return dataclasses.replace(self, unit_ms=self.unit_ms * mean / costs)

    def rank_costs(self, sums: Tensor, largest: Tensor) -> Tensor:
        """Return [E, ..., 3], forward computation, exchanges and backward computation of ranks.

        Args:
            sums: [E, ..., K], sums of the vectors of each rank's tables.
            largest: [E, ..., K], the largest sums of all ranks.
        """
        flat = sums.detach().double().reshape(-1, sums.shape[-1]).numpy()
        forward, backward = self.prices.compute.work_ms(flat[:, :-1], flat[:, :-1]).T
        exchange_ms = self.prices.own_byte_ms * sums[..., -1]
        exchange_ms = exchange_ms + self.prices.busiest_byte_ms * largest[..., -1]
        shape = sums.shape[:-1]
        parts = [torch.from_numpy(forward).view(shape), exchange_ms]
        costs = torch.stack([*parts, torch.from_numpy(backward).view(shape)], dim=-1)
        unit_ms = self.unit_ms.view(-1, *[1] * (costs.dim() - 1))
        return (costs / unit_ms).float()
