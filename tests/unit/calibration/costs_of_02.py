"""Writes what a calibration of 0.2 wrote."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dlrm_sharded.calibration.samples import Sample
from dlrm_sharded.files.json_files import write_json


def write_costs(path: Path, samples: Sequence[Sample], manifest: Mapping[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    pl.DataFrame([sample.to_row() for sample in samples]).write_parquet(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    write_json(path.with_suffix(".json"), {"format": 1, **manifest, "sha256": digest})
