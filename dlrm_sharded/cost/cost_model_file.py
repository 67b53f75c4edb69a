"""The file of a run's cost model, with which the run's plan can be made again.

The costs of a run follow from an artifact or a data sheet, the probes of the hardware, the
versions of kernels, and earlier runs. All of these change with time. The file has the resulting
numbers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dlrm_sharded.cost.exchange_curves import ExchangeCurves
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.learned_arrays import learned_features, model_of_artifact, to_arrays
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.hardware.artifact import (
    ARTIFACT_SUFFIX,
    Arrays,
    artifact_kind,
    built_from,
    checksum,
    read_artifact,
    write_artifact,
)
from dlrm_sharded.hardware.artifact_kinds import Kind
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec
from dlrm_sharded.plans.cost_provenance import CostProvenance

RUN_COST_MODEL = Kind(
    "prices",
    noun="file of a cost model",
    made_with="a run, which writes one beside its plan.json",
    required=("ranges", "measured_links", "standing", "gpu", "correction"),
)
DIGEST_LENGTH = 16


def costs_digest(model: LearnedCostModel) -> str:
    """Return a short hash of everything that the model's predictions depend on."""
    return checksum(*_content(model))[:DIGEST_LENGTH]


def write_cost_model(path: Path, model: object) -> None:
    """Write a model to `path`, whose suffix is `ARTIFACT_SUFFIX`.

    Models other than learned ones follow from their config, and have no such file: an earlier one
    is removed.
    """
    if isinstance(model, LearnedCostModel):
        arrays, meta = _content(model)
        write_artifact(path.parent, path.name.removesuffix(ARTIFACT_SUFFIX), arrays, meta)
    else:
        path.unlink(missing_ok=True)


def cost_model_beside(plan: Path) -> Path:
    """Return the path of the cost model of a plan.json: `prices.safetensors` beside it."""
    stem = "" if plan.name == "plan.json" else f"{plan.stem}."
    return plan.with_name(f"{stem}prices{ARTIFACT_SUFFIX}")


def is_cost_model_file(path: Path) -> bool:
    """Return whether an undamaged file has the cost model of a run, rather than a fitted one."""
    return artifact_kind(path) == RUN_COST_MODEL.name


def read_cost_model(path: Path) -> LearnedCostModel:
    """Return the model of a file; it predicts the same times, to the bit.

    Raises:
        DataError: the file is missing, damaged, or of a version with other costs.
    """
    read = read_artifact(path, kind=RUN_COST_MODEL, features=learned_features)
    meta, provenance, spec = read.meta, None, None
    with built_from(read, RUN_COST_MODEL):  # files of 0.2 have further fields
        if meta["standing"] is not None:
            provenance = read_form(
                meta["standing"], CostProvenance, name="standing", may_have_others=True
            )
        if meta["gpu"] is not None:
            spec = read_form(meta["gpu"], GpuSpec, name="gpu", may_have_others=True)
        model = model_of_artifact(read, spec)
        return dataclasses.replace(model, provenance=provenance, correction=meta["correction"])


def _content(model: LearnedCostModel) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays and the description of a model's file."""
    gpu = None
    if isinstance(model.communication, ExchangeCurves):
        spec = model.communication.host.spec  # its figures may be ints; files have floats
        gpu = dataclasses.asdict(read_form(dataclasses.asdict(spec), GpuSpec, name="the GPU"))
    meta = {
        "kind": RUN_COST_MODEL.name,
        "hardware": model.name,
        "device": model.device,
        "features": learned_features(model.device),
        "ranges": model.ranges,
        "measured_links": model.measured_links,
        "standing": model.provenance and model.provenance.to_json(),
        "gpu": gpu,
        "correction": model.correction,
    }
    return to_arrays(model.compute, model.communication), meta
