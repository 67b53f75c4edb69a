"""Samples that 0.2 collected: random plans and their measured costs, in a Parquet file.

The manifest `costs.json` beside `costs.parquet` has hardware, optimizer, versions, and the checksum
of the data. Today a collection is in the store of its hardware, see `sample_store`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from dlrm_sharded.calibration.samples import Sample, sound_sample
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.json_files import read_json_object
from dlrm_sharded.files.json_forms import read_form
from dlrm_sharded.files.provenance import fbgemm_version
from dlrm_sharded.hardware.artifact_kinds import CALIBRATE
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.hardware import Hardware

COSTS_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Manifest:
    device: str
    optimizer: str
    versions: dict[str, Any]
    sha256: str
    format: int


def read_costs(path: Path) -> tuple[Sequence[Sample], RunContext]:
    """Read collected samples, and what they were measured on.

    Raises:
        DataError: the file is missing or truncated, differs from its manifest, or has times that
            no measurement gives.
    """
    manifest_path = path.with_suffix(".json")
    try:
        fields = read_json_object(manifest_path, noun="manifest")
        manifest = read_form(fields, _Manifest, name=str(manifest_path), may_have_others=True)
        hardware = Hardware.from_meta(fields)
        data = path.read_bytes()
        if manifest.format != COSTS_FORMAT or hashlib.sha256(data).hexdigest() != manifest.sha256:
            raise DataError(f"{path} is not the file that {manifest_path.name} describes")
        samples = [sound_sample(row) for row in pl.read_parquet(data).iter_rows(named=True)]
    except (OSError, LookupError, ValueError, pl.exceptions.PolarsError) as error:
        raise DataError(
            f"the collected costs {path} and {manifest_path.name} cannot be used: {error}; measure "
            f"again with {CALIBRATE}"
        ) from error
    versions = fbgemm_version(manifest.versions)
    context = RunContext(manifest.device, hardware, manifest.optimizer, fbgemm=versions)
    return samples, context
