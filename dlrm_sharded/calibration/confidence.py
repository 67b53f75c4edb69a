"""How sure prices and measurements are, as standard deviations of logarithms.

The fit of `adapt` weighs what prices were before against what runs measured. Both are described
here: prices by how far their factors may be from 1, and a measurement by what other work on the
machine may have added to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlrm_sharded.files.limited import NonNegative
from dlrm_sharded.plans.standing import Standing

SHARED_SPREAD = 2.0
"""Standard deviation of the logarithm of the factor of all parts of a prior's time: e^2 is 7."""

PART_SPREAD = 0.35
"""The same for the factor of one part beside the shared one."""

SLOPE_SHARE = 0.85
"""Spread of a slope, per standard deviation of a number of the profile, relative to that of a part:
0.3 for a prior. Between 0.2 and 0.4, held-out errors were the same within 1 %."""

LEAST_SPREAD = 0.02
"""Least standard deviation of a factor of calibrated prices."""

DEVIATIONS = math.sqrt(math.pi / 2)
"""Standard deviation of a normal distribution relative to its mean absolute deviation."""

ERROR_OF_ONE = 0.3
"""Least expected error of a model that a single plan has corrected."""

NOISE = 0.1
"""Standard deviation of the logarithm of a time that is measured on an otherwise idle machine."""

DISTURBED = 0.2
"""Weight below which a measurement counts as disturbed: a core lost for 18 % of the time."""

MAX_CORE_WAIT = 0.95
"""Share of lost time beyond which all measurements are equally bad."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """How sure the prices are that runs correct.

    Args:
        shared_spread: standard deviation of the logarithm of a direction's or an exchange's speed.
        part_spread: the same for one part of its time beside the others.
        error: error that is expected of them, see `Standing.error`.
        has_tails: whether a few factors may be far beyond the spreads, as on hardware of another
            kind. Their prior is then normal near 1 and exponential far from it.
    """

    shared_spread: float = SHARED_SPREAD
    part_spread: float = PART_SPREAD
    error: float = ERROR_OF_ONE
    has_tails: bool = True

    @property
    def slope_spread(self) -> float:
        """Standard deviation of a slope, see `factor_fit`."""
        return SLOPE_SHARE * self.part_spread

    @classmethod
    def of_standing(cls, standing: Standing | None) -> Confidence:
        """Return how sure prices are by what they say of themselves.

        The factors of calibrated prices have the spreads that explain their errors on held-out
        plans: of whole plans those that parts share, and of ranks of one plan those of single
        parts. A prior says too little of its parts. Nor do prices of a first start need to, as the
        fit knows its samples.
        """
        if standing is None or standing.error is None:
            return cls()
        if standing.kind != "calibrated":
            return cls(error=standing.error if standing.kind == "measured" else ERROR_OF_ONE)
        shared = DEVIATIONS * math.log1p(standing.error)
        part = shared if standing.rank_error is None else standing.rank_error
        return cls(
            shared_spread=min(max(shared, LEAST_SPREAD), SHARED_SPREAD),
            part_spread=min(max(part, LEAST_SPREAD), PART_SPREAD),
            error=standing.error,
            has_tails=False,
        )


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Signs of other work beside a measurement.

    Args:
        core_wait: largest share of the time in which other processes had the core of a rank.
        change: factor between the first and the second half of the measurement.
    """

    core_wait: NonNegative = 0.0
    change: NonNegative = 1.0

    @property
    def noise(self) -> float:
        """Return the standard deviation of the logarithm of a time that the other work causes.

        A rank that lacks its core for a share w of the time takes 1 / (1 - w) times as long. The
        stages may have been hit by all of this or, as medians are taken, by nothing of it; so its
        logarithm counts as a standard deviation, and so does that of the change.
        """
        lost = min(max(self.core_wait, 0.0), MAX_CORE_WAIT)
        return math.hypot(math.log1p(-lost), math.log(max(self.change, 1.0)))

    @property
    def text(self) -> str | None:
        """Say what was found if the measurement counts little; None if it counts."""
        if not is_disturbed(self.noise):
            return None
        if self.core_wait and -math.log1p(-min(self.core_wait, MAX_CORE_WAIT)) > self.noise / 2:
            wait = 100 * self.core_wait
            return f"other processes had the core of a rank for {wait:.0f} % of the time"
        return f"its second half took {self.change:.2f} times as long as its first, or the reverse"


def is_disturbed(noise: float) -> bool:
    """Return whether a measurement with so much noise from other work counts so little."""
    return reliability(noise) < DISTURBED


def reliability(noise: float) -> float:
    """Return the weight of a time, given the noise of other work beside that of an idle machine."""
    return NOISE**2 / (NOISE**2 + noise**2)
