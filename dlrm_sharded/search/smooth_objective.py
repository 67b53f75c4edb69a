"""A smooth stand-in for the objective: norms of the ranks' loads instead of their maxima.

Letters: L loads, W ranks, H hosts; see `problem.py`.
"""

from __future__ import annotations

import numpy as np

from dlrm_sharded.cost.workload import Floats
from dlrm_sharded.search.state import State

NUM_SQUARINGS = 7
"""The norm's exponent is 2 to this power: 128, so high that only the fullest ranks count. Study:
norms."""

EXPONENT = 2.0**NUM_SQUARINGS

MAX_POWER = 1e290
"""Higher powers are cut to this, because they might overflow."""

MIN_LOAD_MS = 1e-12
"""Smaller loads are rounding errors of loads that were taken away."""

MIN_POWER_SUM = 1e-300
"""Smallest sum of powers by which to divide."""


class SmoothObjective:
    """Norms of a state's loads, and their slopes.

    Attributes:
        value_ms: their sum plus the shared time; a little above `State.objective_ms`.
        scale: [L], the largest loads, by which loads are divided before powers are taken.
        powers: [W, L], powers of each rank's loads.
        slope: [L], by how much the value grows with a sum of powers, to first order.
    """

    def __init__(self, state: State) -> None:
        self.scale = np.maximum(state.load.max(axis=0), MIN_LOAD_MS)
        # Scaled, the largest load has the power 1, and only loads near it count for the norm.
        self.powers = self.powers_of(state.load)
        sums = np.maximum(self.powers.sum(axis=0), MIN_POWER_SUM)
        norms = self.scale * sums ** (1.0 / EXPONENT)
        # The derivative of s^(1/p) is s^(1/p) / (s p).
        self.slope = norms / sums / EXPONENT
        self.value_ms = float(norms.sum()) + state.shared_ms
        self.has_hosts = state.num_hosts > 1 and bool(state.host_load.max() > MIN_LOAD_MS)
        if self.has_hosts:
            self.host_scale = float(state.host_load.max())
            self.host_powers = self.power(state.host_load / self.host_scale)
            norm = self.host_scale * self.host_powers.sum() ** (1.0 / EXPONENT)
            self.host_slope = float(norm / self.host_powers.sum() / EXPONENT)
            self.value_ms += float(norm)

    def powers_of(self, load: Floats) -> Floats:
        """Return the powers of loads [..., L]."""
        return self.power(load / self.scale)

    def norm_ms(self, power_sums: Floats) -> Floats:
        """Return the sum over loads [...] of the norms that follow from sums of powers [..., L]."""
        return (self.scale * power_sums ** (1.0 / EXPONENT)).sum(axis=-1)

    def rank_shares(self) -> Floats:
        """Return [W], what each rank adds to the value, to first order."""
        shares: Floats = (self.powers * self.slope).sum(axis=1)
        if self.has_hosts:
            # A host's share is divided among its ranks.
            per_host = len(self.powers) // len(self.host_powers)
            shares = shares + np.repeat(self.host_powers * self.host_slope, per_host) / per_host
        return shares

    def power(self, values: Floats) -> Floats:
        """Return values to the power of the norm's exponent; 0 for negative values.

        The estimated load of a rank without one of its pieces is negative if that piece costs more
        on an average rank than beside the others on this rank.
        """
        most = MAX_POWER ** (1.0 / EXPONENT)
        powers = np.minimum(np.maximum(values, 0.0), most)
        for _ in range(NUM_SQUARINGS):  # several times faster than `**` with a float
            powers = powers * powers
        return powers
