"""Priors: what a cost model of some hardware starts from, before anything is measured there.

They are the packaged model of one CPU, the data sheet of a GPU, or a file that is named.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from dlrm_sharded.cost.communication import EXCHANGES, STATED, CommunicationModel, with_stated
from dlrm_sharded.cost.gpu_prior import gpu_cost_model
from dlrm_sharded.cost.learned import KIND, LearnedCostModel
from dlrm_sharded.cost.learned_arrays import learned_features, model_of_artifact
from dlrm_sharded.cost.prior import provenance_of_artifact
from dlrm_sharded.hardware.artifact import SHIPPED, Artifact, built_from, load_artifact
from dlrm_sharded.hardware.artifact_kinds import cost_model_kind
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.match import Match
from dlrm_sharded.plans.cost_provenance import CostProvenance

log = logging.getLogger(__name__)

RECOGNIZED_ERROR = 0.3
"""Least error stated for hardware that is recognized, and on which nothing was measured yet: the
packaged costs were 26 to 33 % off on an AMD EPYC of another family that they seemed to fit."""


def learned_cost_model(
    context: RunContext,
    artifact: str | None = None,
    gpu: Mapping[str, Any] | None = None,
    *,
    warns: bool = True,
) -> LearnedCostModel:
    """Load the packaged model of a run's hardware, or, with a warning, one of other hardware.

    On GPUs it is the prior of the run's GPU, unless a file is named. What was measured on the
    hardware is left out, see `hardware_costs.hardware_cost_model`.

    Args:
        artifact: file of a fitted model; None to look for the one of the hardware in the package,
            and in `context.calibrated` if that names a folder.
        gpu: figures of a GPU that is in no data sheet of the package, see `GpuSpec.stated`.
        warns: see `load_artifact`.

    Raises:
        DataError: the file is missing or damaged, or there is none.
        ConfigError: the figures of the GPU cannot be used.
    """
    kind = cost_model_kind(KIND)
    if artifact is None and context.device == "cuda":
        return gpu_cost_model(context, gpu)
    loaded = load_artifact(artifact, kind, learned_features, context, warns=warns)
    with built_from(loaded, kind):
        model = dataclasses.replace(model_of_artifact(loaded), provenance=_provenance(loaded))
    if loaded.match is not None and not loaded.match.is_same:
        model = _at_speed_of(model, loaded.match)
    if model.device != context.device:
        # Exchanges between CPUs do not predict exchanges between GPUs.
        model = dataclasses.replace(model, communication=STATED, measured_links=())
    return model


def _provenance(loaded: Artifact) -> CostProvenance:
    """Return where a file's costs come from; the package's have not been checked here."""
    provenance = provenance_of_artifact(loaded)
    if provenance.kind != "calibrated" or loaded.path.parent != SHIPPED:
        return provenance
    return CostProvenance(
        "prior",
        provenance.hardware,
        (f"recognized as {provenance.hardware}, nothing is measured here yet",),
        error=max(provenance.error or 0.0, RECOGNIZED_ERROR),
    )


def _at_speed_of(model: LearnedCostModel, match: Match) -> LearnedCostModel:
    """Scale a prior by the probes: computation by gathers, measured exchanges by all-to-alls."""
    factor = match.compute_factor
    assert isinstance(model.communication, CommunicationModel), "files of fits have no curves"
    exchanges = model.communication.scaled(dict.fromkeys(EXCHANGES, match.exchange_factor))
    return dataclasses.replace(
        model,
        compute=model.compute.scaled(forward=factor, backward=factor),
        communication=with_stated(exchanges, measured=model.measured_links),
    )
