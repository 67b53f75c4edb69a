"""Priors: cost models of GPUs that nobody has calibrated, from public figures alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dlrm_sharded.cost.exchange_curves import ExchangeCurves
from dlrm_sharded.cost.exchange_terms import LINKS
from dlrm_sharded.cost.features import EXTENT
from dlrm_sharded.cost.gpu_lookups import LEFT_OUT_ERRORS, LOOKUP_ERROR, MEASURED_ERROR, gpu_compute
from dlrm_sharded.cost.learned import ANY_VALUE, LearnedCostModel
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.gpus.collectives import HostCollectives
from dlrm_sharded.hardware.gpus.gpu_specs import GENERIC, GpuSpec, find_gpu_spec, gpu_specs
from dlrm_sharded.plans.cost_provenance import CostProvenance

log = logging.getLogger(__name__)

EXCHANGE_ERROR = {"nvlink": 0.3, "pcie": 0.7}
"""Relative error of exchanges, by the class of the links.

NVLink: the largest mean error of a left-out GPU. PCIe: large exchanges take up to 4.5 times as
long on the only host that was measured, and hosts differ by such factors.
"""

UNKNOWN_ERROR = 1.0
"""Relative error for an unknown GPU."""


def gpu_cost_model(
    context: RunContext, figures: Mapping[str, Any] | None = None
) -> LearnedCostModel:
    """Return the prior of a run's GPU.

    Args:
        figures: figures of a GPU without a data sheet in the package, see `GpuSpec.stated`.

    Raises:
        ConfigError: the figures cannot be used.
    """
    name = None if context.hardware is None else context.hardware.name
    found = find_gpu_spec(name or "")
    if figures is not None:
        found = GpuSpec.stated(figures, key="cost_model.gpu")
    if found is None:
        spec, error, level = gpu_specs()[GENERIC], UNKNOWN_ERROR, logging.WARNING
        reason = _why_generic(name)
    else:
        spec, error, level = found, max(LOOKUP_ERROR, EXCHANGE_ERROR[found.link]), logging.INFO
        reason = _source(found)
    log.log(level, "cost model: prior of %s: %s", spec.key, reason)
    return LearnedCostModel(
        gpu_compute(spec, context.optimizer),
        ExchangeCurves(HostCollectives(spec)),
        name=spec.device_name,
        device="cuda",
        ranges=dict.fromkeys(EXTENT, ANY_VALUE),
        measured_links=LINKS,
        provenance=CostProvenance("prior", spec.device_name, (reason,), error=error),
    )


def _why_generic(name: str | None) -> str:
    """Return a sentence on a GPU that is in no data sheet."""
    unknown = "no GPU is named" if name is None else f"the package has no data sheet of {name!r}"
    return (
        f"{unknown}, so the figures of {GENERIC} stand for a data-center GPU; in dlrm-plan, name "
        "yours with hardware=..., or state its figures in cost_model.gpu={memory_gb_per_s: ..., "
        "link_gb_per_s: ...}; if the ranks are CPUs, set topology.compute_device to cpu"
    )


def _source(spec: GpuSpec) -> str:
    h100, v100 = (100 * LEFT_OUT_ERRORS[key] for key in ("h100", "v100"))
    lookups = (
        "lookups follow from public measurements on H100 and V100 (each source is predicted by the "
        f"others within {h100:.0f} and {v100:.0f} % on average; an H200 with row-wise Adagrad was "
        f"off by {100 * MEASURED_ERROR:.0f} %)"
    )
    if spec.link == "pcie":
        return f"{lookups}, exchanges from those of NCCL on hosts with PCIe and with NVLink"
    if spec.collectives is not None:
        return f"{lookups}, exchanges from public measurements of NCCL on this GPU"
    return f"{lookups}, exchanges from those of NCCL on GPUs with similar links"
