"""How well a cost model knows the hardware that it predicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

EXTRAPOLATED = "extrapolated"
"""Beginning of a reason that names a quantity outside the fitted range."""


@dataclass(frozen=True, slots=True)
class CostProvenance:
    """The origin of a cost model's unit costs, and how far its predictions may be off.

    Args:
        kind: "calibrated" if the costs were fitted on this hardware, "measured" if they are a
            prior that was fitted to plans measured on it, else "prior".
        hardware: name of the hardware to which the costs belong.
        reasons: sentences, without full stops, that say why costs are a prior; empty for
            calibrated ones. For measured ones, what there is to know of them. The provenance of a
            prediction also says where the model extrapolates.
        num_runs: number of measured runs on this hardware that correct the costs.
        error: expected error of a predicted critical path, relative to the measured one; None if
            it is not known.
        rank_error: see `cost.expected_maximum.with_expected_excess`; None if it is not known.
        under_load: whether most of what was measured was measured while other processes ran.
    """

    kind: Literal["calibrated", "measured", "prior"]
    hardware: str
    reasons: tuple[str, ...] = ()
    num_runs: int = 0
    error: float | None = None
    rank_error: float | None = None
    under_load: bool = False

    @property
    def short_text(self) -> str:
        """Describe the costs briefly, such as prior, corrected by 2 runs, within about 15 %."""
        parts = [str(self.kind)]
        if self.num_runs:
            parts.append(f"corrected by {self.num_runs} run{'s' * (self.num_runs > 1)}")
        if self.under_load:
            parts.append("measured under load")
        if self.error is not None:
            parts.append(within_text(self.error))
        return ", ".join(parts)

    @property
    def text(self) -> str:
        """One line with the hardware and the reasons."""
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"{self.short_text} (costs of {self.hardware}){why}"

    @property
    def is_extrapolated(self) -> bool:
        """Return whether a prediction with it is outside the fitted range."""
        return any(reason.startswith(EXTRAPOLATED) for reason in self.reasons)

    def extrapolated(self, beyond: Sequence[str]) -> CostProvenance:
        """Return the provenance of a prediction with these quantities outside the fitted range."""
        where = (f"{EXTRAPOLATED}: {quantity}" for quantity in beyond)
        return dataclasses.replace(self, reasons=(*self.reasons, *where))

    def to_json(self) -> dict[str, Any]:
        """Return the form in plan.json."""
        return {**dataclasses.asdict(self), "reasons": list(self.reasons)}


def within_text(error: float) -> str:
    """Say how far a time may be off, for a relative error: 0.5 is a factor of 1.5."""
    if error > 2.0:
        return f"within a factor of about {1.0 + error:.0f}"
    return f"within about {100 * error:.0f} %"
