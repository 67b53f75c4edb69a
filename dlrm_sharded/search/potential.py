"""What the search descends: the 128-norm of the ranks' loads, for each load, and their slopes.

Letters: L loads, W ranks, H hosts; see `problem.py`.
"""

from __future__ import annotations

import numpy as np

from dlrm_sharded.cost.features import Floats
from dlrm_sharded.search.state import State

DOUBLINGS = 7
"""The norm's exponent is 2 to this power: high enough that full ranks alone count."""

LARGEST = 200.0
"""Loads beyond this multiple of the largest are all as bad: their powers would overflow."""

LEAST_MS = 1e-12
"""Less is what rounding leaves of loads that were taken away."""


class Potential:
    """The norms of a state's loads.

    Attributes:
        value: their sum, with what ranks share, in ms; a little above `State.objective_ms`.
        powers: [W, L], of each rank's load over `scale`.
        slope: [L], by how much the value grows with a power.
    """

    def __init__(self, state: State) -> None:
        exponent = 2.0**DOUBLINGS
        self.scale = np.maximum(state.load.max(axis=0), LEAST_MS)
        self.powers = self.of_loads(state.load)
        sums = np.maximum(self.powers.sum(axis=0), 1e-300)
        norms = self.scale * sums ** (1.0 / exponent)
        self.slope = norms / sums / exponent
        self.value = float(norms.sum()) + state.shared_ms
        self.has_hosts = state.num_hosts > 1 and bool(state.host_load.max() > LEAST_MS)
        if self.has_hosts:
            self.host_scale = float(state.host_load.max())
            self.host_powers = self.power(state.host_load / self.host_scale)
            norm = self.host_scale * self.host_powers.sum() ** (1.0 / exponent)
            self.host_slope = float(norm / self.host_powers.sum() / exponent)
            self.value += float(norm)

    def of_loads(self, load: Floats) -> Floats:
        return self.power(load / self.scale)

    def power(self, values: Floats) -> Floats:
        powers = np.minimum(values, LARGEST)
        for _ in range(DOUBLINGS):
            powers = powers * powers
        return powers

    def norms(self, power_sums: Floats) -> Floats:
        """[...], of sums [..., L]."""
        total: Floats = (self.scale * power_sums ** (2.0**-DOUBLINGS)).sum(axis=-1)
        return total

    def of_ranks(self) -> Floats:
        """[W], what each rank adds to the value, to first order."""
        return (self.powers * self.slope).sum(axis=1) + self._of_hosts()

    def _of_hosts(self) -> Floats | float:
        if not self.has_hosts:
            return 0.0
        per_host = len(self.powers) // len(self.host_powers)
        return np.repeat(self.host_powers * self.host_slope, per_host) / per_host
