"""How much a measurement counts, given the other work on the machine while it was made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlrm_sharded.files.limited import NonNegative

NOISE = 0.1
"""Standard deviation of the logarithm of a time that is measured on an otherwise idle machine.

With 0.05 and 0.2 in its place, plans that a fit had not seen were predicted about as well (156
plans of an H200, 34 of an Intel Xeon, 5-fold)."""

DISTURBED = 0.2
"""Weight below which a measurement counts as disturbed: a core lost for 18 % of the time."""

MAX_LOST = 0.95
"""Share of lost time beyond which all measurements are equally bad."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Signs of other work during a measurement.

    Args:
        core_wait: largest share of the time in which other processes had the core of a rank.
        change: factor between the first and the second half of the measurement.
    """

    core_wait: NonNegative = 0.0
    change: NonNegative = 1.0

    @property
    def noise(self) -> float:
        """Return the standard deviation that other work causes in the logarithm of a time.

        A rank that lacks its core for a share w of the time takes 1 / (1 - w) times as long. All of
        this may have hit the stages or, because medians are taken, none of it, so its logarithm
        counts as a standard deviation; so does that of the change.
        """
        lost = min(max(self.core_wait, 0.0), MAX_LOST)
        return math.hypot(math.log1p(-lost), math.log(max(self.change, 1.0)))

    @property
    def text(self) -> str | None:
        """Say what was found if the measurement counts little; None if it counts."""
        if not is_disturbed(self.noise):
            return None
        if self.core_wait and -math.log1p(-min(self.core_wait, MAX_LOST)) > self.noise / 2:
            return core_wait_text(self.core_wait)
        return f"its second half took {self.change:.2f} times as long as its first, or the reverse"


def core_wait_text(share: float) -> str:
    """Say for which share of the time other processes had the core of a rank."""
    return f"other processes had the core of a rank for {100 * share:.0f} % of the time"


def is_disturbed(noise: float) -> bool:
    """Return whether other work causes so much noise that a measurement counts as disturbed."""
    return reliability(noise) < DISTURBED


def reliability(noise: float) -> float:
    """Return the weight of a time, given its noise from other work, see `Disturbance.noise`."""
    return NOISE**2 / (NOISE**2 + noise**2)
