"""A file of prices: a cost model as a run had it, by which the run's plan can be made again.

The prices of a run follow from an artefact or a data sheet, the probes of the hardware, the
versions of kernels, and earlier runs. All of these change with time. The file has the numbers that
came out.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_sharded.cost.communication import EXCHANGES
from dlrm_sharded.cost.exchange_curves import ExchangeCurves
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.learned_arrays import from_arrays, learned_features, to_arrays
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
from dlrm_sharded.hardware.gpus.collectives import HostCollectives
from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec
from dlrm_sharded.plans.standing import Standing

PRICES = Kind(
    "prices",
    noun="file of prices",
    made_with="a run, which writes one beside its plan.json",
    required=("ranges", "measured_links", "standing", "gpu", "correction"),
)
CURVES = "curves."
"""Beginning of the names of arrays with the factors of an exchange's curve."""

DIGEST_LENGTH = 16


def prices_digest(model: LearnedCostModel) -> str:
    """Return a short hash of all that predictions of the model follow from."""
    return checksum(*_content(model))[:DIGEST_LENGTH]


def write_prices(path: Path, model: object) -> None:
    """Write the prices of a model to `path`, whose suffix is `ARTIFACT_SUFFIX`.

    Other models than learned ones follow from their config, and have no such file.
    """
    if isinstance(model, LearnedCostModel):
        arrays, meta = _content(model)
        write_artifact(path.parent, path.name.removesuffix(ARTIFACT_SUFFIX), arrays, meta)


def prices_beside(plan: Path) -> Path:
    """Return the path of the prices of a plan.json: prices.safetensors beside it."""
    stem = "" if plan.name == "plan.json" else f"{plan.stem}."
    return plan.with_name(f"{stem}prices{ARTIFACT_SUFFIX}")


def is_price_file(path: Path) -> bool:
    """Return whether a sound file has prices, and not a fitted model."""
    return artifact_kind(path) == PRICES.name


def read_prices(path: Path) -> LearnedCostModel:
    """Return the model whose prices a file has; it predicts the same times, to the bit.

    Raises:
        DataError: the file is missing, damaged, or of a version with other prices.
    """
    read = read_artifact(path, kind=PRICES, features=learned_features)
    meta, arrays = read.meta, read.arrays
    with built_from(read, PRICES):
        compute, communication = from_arrays(arrays, meta["device"])
        curves = standing = None
        if meta["standing"] is not None:
            standing = read_form(meta["standing"], Standing, name="the standing of the prices")
        if meta["gpu"] is not None:
            # files of 0.2 also have the peak rates of matrix products
            spec = read_form(
                meta["gpu"], GpuSpec, name="the GPU of the prices", may_have_others=True
            )
            factors = {kind: arrays[CURVES + kind] for kind in EXCHANGES if CURVES + kind in arrays}
            curves = ExchangeCurves(HostCollectives(spec), factors or None)
        return LearnedCostModel(
            compute,
            communication,
            name=meta["hardware"],
            device=meta["device"],
            ranges={
                name: (float(low), float(high)) for name, (low, high) in meta["ranges"].items()
            },
            measured_links=tuple(meta["measured_links"]),
            standing=standing,
            exchange_curves=curves,
            correction=meta["correction"],
        )


def _content(model: LearnedCostModel) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays and the description of a model's file."""
    arrays = to_arrays(model.compute, model.communication)
    curves, gpu = model.exchange_curves, None
    if curves is not None:
        spec = curves.host.spec  # whose figures may be whole numbers, and are read as floats
        gpu = dataclasses.asdict(read_form(dataclasses.asdict(spec), GpuSpec, name="the GPU"))
        arrays |= {CURVES + kind: np.asarray(of) for kind, of in (curves.factors or {}).items()}
    meta = {
        "kind": PRICES.name,
        "hardware": model.name,
        "device": model.device,
        "cores": 0,  # what artefacts say of the machine that they were fitted on
        "optimizer": "",
        "features": learned_features(model.device),
        "ranges": model.ranges,
        "measured_links": model.measured_links,
        "standing": model.standing and model.standing.to_json(),
        "gpu": gpu,
        "correction": model.correction,
    }
    return arrays, meta
