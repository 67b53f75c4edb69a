"""Priors: what to expect of GPUs that nobody has calibrated, from public figures alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.cost.compute import ComputeModel
from dlrm_sharded.cost.exchange_curves import ExchangeCurves
from dlrm_sharded.cost.gpu_lookups import (
    LEFT_OUT_ERRORS,
    LOOKUP_ERROR,
    MEASURED_ERROR,
    gpu_compute,
)
from dlrm_sharded.hardware.gpus.collectives import HostCollectives
from dlrm_sharded.hardware.gpus.gpu_specs import GENERIC, GpuSpec, find_gpu_spec, gpu_specs
from dlrm_sharded.plans.standing import Standing

EXCHANGE_ERROR = {"nvlink": 0.3, "pcie": 0.7}
"""Relative error of exchanges, by the class of the links.

NVLink: the largest mean error of a left-out GPU. PCIe: large exchanges take up to 4.5 times as
long on the only host that was measured, and hosts differ by such factors.
"""

UNKNOWN_ERROR = 1.0
"""Relative error for an unknown GPU."""


@dataclass(frozen=True, slots=True)
class GpuPrior:
    """The parts of a cost model of a GPU that nobody has calibrated.

    Args:
        is_generic: whether the figures are those of another GPU, as the right ones are not known.
    """

    spec: GpuSpec
    compute: ComputeModel
    exchanges: ExchangeCurves
    standing: Standing
    is_generic: bool


def gpu_prior(
    name: str | None, optimizer: str | None, figures: Mapping[str, Any] | None = None
) -> GpuPrior:
    """Return the prior of a GPU.

    Args:
        name: key or device name of the GPU; None if it is not known.
        optimizer: fused optimizer of the tables; None for `gpu_lookups.DEFAULT_OPTIMIZER`.
        figures: figures of a GPU that no data sheet of the package has, see `GpuSpec.stated`.

    Raises:
        ConfigError: the figures cannot be used.
    """
    spec, reason, error = _known(name, figures)
    return GpuPrior(
        spec=spec,
        compute=gpu_compute(spec, optimizer),
        exchanges=ExchangeCurves(HostCollectives(spec)),
        standing=Standing(kind="prior", hardware=spec.device_name, reasons=(reason,), error=error),
        is_generic=spec.key == GENERIC and error == UNKNOWN_ERROR,
    )


def _known(name: str | None, figures: Mapping[str, Any] | None) -> tuple[GpuSpec, str, float]:
    """Return the data sheet to use, a sentence on where the prices are from, and their error."""
    if figures is not None:
        spec = GpuSpec.stated(figures, key="cost_model.gpu")
        return spec, _source(spec), _error(spec)
    found = None if name is None else find_gpu_spec(name)
    if found is not None:
        return found, _source(found), _error(found)
    spec = gpu_specs()[GENERIC]
    unknown = "no GPU is named" if name is None else f"the package has no data sheet of {name!r}"
    way = (
        "name yours with hardware=..., or set topology.compute_device to cpu if the ranks are CPUs"
        if name is None
        else "state its own in cost_model.gpu={memory_gb_per_s: ..., link_gb_per_s: ...}"
    )
    reason = f"{unknown}, so the figures of {spec.key} stand for a data-centre GPU; {way}"
    return spec, reason, UNKNOWN_ERROR


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


def _error(spec: GpuSpec) -> float:
    return max(LOOKUP_ERROR, EXCHANGE_ERROR[spec.link])
