"""Says whether a fitted model is calibrated for a run, and how far its costs may be off."""

from __future__ import annotations

from dlrm_sharded.hardware.artifact import Artifact
from dlrm_sharded.plans.cost_provenance import CostProvenance

OTHER_HARDWARE_ERROR = 0.7
"""Smallest error stated for costs of hardware with another fingerprint.

A model of a CPU with AVX-512 predicted 34.7 ms for a plan that took 119 to 127 ms on one without.
"""


def provenance_of_artifact(loaded: Artifact) -> CostProvenance:
    """Say whether an artifact's costs are of the run's hardware, and how far they may be off."""
    match, name = loaded.match, loaded.meta["hardware"]
    pairs = loaded.meta.get("held_out_errors", {}).get("plan, critical path")
    held_out = None if pairs is None else float(pairs["mape"]) / 100
    if match is not None and match.is_same:
        rank_error, disturbed = loaded.meta.get("rank_error"), loaded.meta.get("num_disturbed")
        load = (f"{disturbed} plans were measured under load",) if disturbed else ()
        return CostProvenance("calibrated", name, load, error=held_out, rank_error=rank_error)
    reasons = () if match is None else match.reasons
    if match is None or not match.speeds:
        return CostProvenance("prior", name, reasons)
    least = 0.0 if match.has_same_fingerprint else OTHER_HARDWARE_ERROR
    return CostProvenance(
        "prior", name, reasons, error=max(held_out or 0.0, match.distance - 1, least)
    )
