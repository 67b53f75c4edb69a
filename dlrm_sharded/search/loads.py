"""The loads of a rank: the times that make up the objective of the search.

Letters: L loads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dlrm_sharded.cost.exchange_costs import ExchangeCosts
from dlrm_sharded.cost.workload import Floats

NUM_LOADS = 4


class Load:
    """The columns of an array of loads [..., L], in ms."""

    COST = 0
    """Computation and the rank's own part in the exchanges, which make up the plan's cost."""
    COMPUTE = slice(1, 3)
    """Forward and backward computation, two stages of the critical path."""
    EXCHANGE = 3
    """Exchanges, the other stage of the critical path."""
    PROCESSING = slice(0, 3)
    """All but the exchanges that other ranks wait for."""


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Weights from which the loads of a rank follow, given its computation and exchanges.

    The maximum of `Load.COST` over ranks is the plan's cost, apart from what all ranks share. The
    maxima of the other loads add up to its critical path. The objective weighs the two.

    Attributes:
        compute: [2, L], weights of forward and backward computation in each load.
    """

    critical_path_share: float
    exchange_costs: ExchangeCosts
    compute: Floats = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        share = self.critical_path_share
        weights = np.zeros((2, NUM_LOADS))
        weights[:, Load.COST] = 1.0 - share
        weights[:, Load.COMPUTE] = share * np.eye(2)
        object.__setattr__(self, "compute", weights)

    @property
    def exchange(self) -> Floats:
        """[L], weight of a rank's own exchange time in each load."""
        share = self.critical_path_share
        return np.array([1.0 - share, 0.0, 0.0, share])

    def loads(self, compute_ms: Floats, volume: Floats) -> Floats:
        """Return the loads [n, L] of ranks or pieces.

        Args:
            compute_ms: [n, 2], forward and backward computation.
            volume: [n], bytes exchanged with every other rank.
        """
        share = self.critical_path_share
        # A rank's own bytes take its time; they count for cost and for the critical path.
        loads = self.exchange_costs.own_byte_ms * volume[:, None] * self.exchange
        loads[:, Load.COST] += (1.0 - share) * compute_ms.sum(axis=1)
        loads[:, Load.COMPUTE] += share * compute_ms
        # All ranks wait for the rank with most bytes, so its bytes count as a maximum over ranks.
        loads[:, Load.EXCHANGE] += self.exchange_costs.busiest_rank_byte_ms * volume
        return loads
