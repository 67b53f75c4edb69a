"""Costs of ranks by a run's cost model, for policies that were trained on other hardware.

A policy reads costs that its cost network predicts for the hardware of its training. On other
hardware, the costs of an additive cost model take their place, under which every table adds a
vector to its rank, as it does under the network. Costs that no placement of whole tables changes
are left out, as are constants of the networks: launches, latencies, and what all ranks pay for a
byte of any rank.

Letters: E episodes, T tables, K numbers of a table.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlrm_sharded.cost.base import CostedTask
from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.exchange_costs import ExchangeCosts
from dlrm_sharded.cost.workload import workload_of_tables


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What the tables of a task cost a rank on the run's hardware, in place of a cost network.

    All episodes are of one task, and differ in the order of its tables.

    A table's vector has the numbers of `ComputeModel.vectors`, and last the bytes of pooled vectors
    that its rank exchanges with every other rank.

    Args:
        own_byte_ms, busiest_byte_ms: time of such a byte of the rank itself and of the busiest
            rank, in both exchanges of a step, near even volumes, see `ExchangeCosts`.
        vectors: [E, T, K], of the task's tables.
        unit_ms: [1], milliseconds per unit of the task's costs.
    """

    compute: ComputeModel
    own_byte_ms: float
    busiest_byte_ms: float
    vectors: Tensor
    unit_ms: Tensor

    @classmethod
    def from_task(cls, costed: CostedTask) -> RankCosts:
        """Build the costs of one task, in milliseconds."""
        compute, hosts = costed.compute, costed.hosts
        own_byte_ms, busiest_byte_ms, sequences = 0.0, 0.0, (1.0, 1.0)
        if hosts.world_size > 1:
            exchange = ExchangeCosts.from_model(costed.communication, hosts)
            own_byte_ms, sequences = exchange.own_byte_ms, exchange.sequences
            # the busiest rank is on the busiest host, so a byte there counts for both
            busiest_byte_ms = exchange.busiest_rank_byte_ms + exchange.busiest_host_byte_ms
        workload = workload_of_tables(costed.task.tables, costed.task.batch_size)
        # the workload is of one rank, which would exchange all of its vectors with itself
        volume = workload.vector_bytes(sequences) / hosts.world_size
        vectors = torch.from_numpy(np.column_stack([compute.vectors(workload), volume])[None])
        unit_ms = torch.ones(1, dtype=torch.float64)
        return cls(compute, own_byte_ms, busiest_byte_ms, vectors.double(), unit_ms)

    def select(self, episodes: Tensor) -> RankCosts:
        """Return the costs of the episodes with indices [N]."""
        return dataclasses.replace(self, vectors=self.vectors[episodes])

    def reorder(self, order: Tensor) -> RankCosts:
        """Return the costs with the tables in the order [E, T]."""
        index = order[..., None].expand_as(self.vectors)
        return dataclasses.replace(self, vectors=self.vectors.gather(1, index))

    def with_mean(self, costs: Tensor) -> RankCosts:
        """Return the costs in the unit in which tables, each alone on a rank, cost [1] on average.

        So a policy reads costs of the size on which it was trained, and its plans do not change if
        all costs are scaled.
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
        work_ms = torch.from_numpy(self.compute.work_ms(flat[:, :-1], flat[:, :-1]))
        forward, backward = work_ms.view(*sums.shape[:-1], 2).unbind(-1)
        exchange_ms = self.own_byte_ms * sums[..., -1] + self.busiest_byte_ms * largest[..., -1]
        costs = torch.stack([forward, exchange_ms, backward], dim=-1)
        return (costs / self.unit_ms).float()
