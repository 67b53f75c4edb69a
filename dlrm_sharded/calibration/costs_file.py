"""Collected costs: random plans and their measured costs on one machine, in a Parquet file.

The manifest `costs.json` beside `costs.parquet` has hardware, versions, seed, batch sizes,
repeatability, and the checksum of the data.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dlrm_sharded.calibration.disturbance import is_disturbed
from dlrm_sharded.calibration.samples import (
    TIMES,
    CollectedCosts,
    Sample,
    check_sample,
    repeatability,
)
from dlrm_sharded.files.errors import DataError
from dlrm_sharded.files.json_files import read_file, replace_file, write_json
from dlrm_sharded.hardware.artifact_kinds import CALIBRATE

COSTS_FORMAT = 1

_FIRST_SHARD: dict[str, pl.DataType | type[pl.DataType]] = {
    "rank": pl.Int32,
    "num_rows": pl.Int64,
    "num_cols": pl.Int32,
    "pooling_factor": pl.Float64,
    "reuse_histogram": pl.List(pl.Float32),
    "row_wise": pl.Boolean,
}
_LATER_SHARD = _FIRST_SHARD | {"accesses": pl.String}
_POOLED_SHARD = _LATER_SHARD | {"replicated": pl.Boolean}
_UNNUMBERED_SHARD = _POOLED_SHARD | {"pooled": pl.Boolean}
_SHARD = _UNNUMBERED_SHARD | {"module": pl.Int32, "num_features": pl.Int32}
SCHEMA = pl.Schema(
    {
        "kind": pl.String(),
        "number": pl.Int64(),
        "attempt": pl.Int32(),
        "world_size": pl.Int32(),
        "ranks_per_host": pl.Int32(),
        "batch_size": pl.Int64(),
        "shards": pl.List(pl.Struct(_SHARD)),
        "per_rank": pl.List(pl.Struct({f"{name}_ms": pl.Float64 for name in TIMES})),
        "noise": pl.Float64(),
    }
)
_WITHOUT_NOISE = pl.Schema({name: kind for name, kind in SCHEMA.items() if name != "noise"})

_KNOWN_SCHEMAS = [
    SCHEMA,
    pl.Schema({**SCHEMA, "shards": pl.List(pl.Struct(_UNNUMBERED_SHARD))}),
    *(
        pl.Schema({**_WITHOUT_NOISE, "shards": pl.List(pl.Struct(shard))})
        for shard in (_UNNUMBERED_SHARD, _POOLED_SHARD, _LATER_SHARD, _FIRST_SHARD)
    ),
]
"""Columns of collections today, of those that knew neither modules nor features, of those that did
not watch other work either, of those without sequences, of those without replicas, and of those in
which, besides, all accesses are Zipf-distributed."""


def write_costs(path: Path, samples: Sequence[Sample], manifest: Mapping[str, Any]) -> None:
    """Write the data and then the manifest, without which `read_costs` refuses them."""
    frame = pl.DataFrame([sample.to_row() for sample in samples], schema=SCHEMA)
    parquet = io.BytesIO()
    frame.write_parquet(parquet)
    replace_file(path, parquet.getvalue())
    write_json(
        manifest_path(path),
        {
            "format": COSTS_FORMAT,
            **manifest,
            "num_samples": len(samples),
            "num_disturbed": sum(is_disturbed(sample.noise) for sample in samples),
            "repeatability": repeatability(samples),
            "sha256": hashlib.sha256(parquet.getvalue()).hexdigest(),
        },
    )


def manifest_path(path: Path) -> Path:
    """Return where the manifest of a Parquet file is."""
    return path.with_suffix(".json")


def read_costs(path: str | Path) -> CollectedCosts:
    """Read collected costs and check all of them.

    Raises:
        DataError: the file is missing or truncated, differs from its manifest, or has times that
            no measurement gives.
    """
    path = Path(path)
    try:
        manifest = json.loads(read_file(manifest_path(path)))
        data = read_file(path)
    except OSError as error:
        raise DataError(
            f"cannot read the collected costs {path} and their manifest "
            f"{manifest_path(path).name}: {error.strerror}; make them with {CALIBRATE}"
        ) from error
    except ValueError as error:
        raise DataError(
            f"the manifest {manifest_path(path)} is not JSON; collect again with {CALIBRATE}"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != COSTS_FORMAT:
        raise DataError(
            f"{manifest_path(path)} is not a manifest of format {COSTS_FORMAT}; collect again with "
            f"{CALIBRATE}"
        )
    if hashlib.sha256(data).hexdigest() != manifest.get("sha256"):
        raise DataError(
            f"{path} ({len(data):,} B) is not the file that {manifest_path(path).name} describes: "
            f"truncated, or changed since; collect again with {CALIBRATE}"
        )
    try:
        frame = pl.read_parquet(data)
    except pl.exceptions.PolarsError as error:
        raise DataError(
            f"{path} is not a Parquet file ({error}); collect again with {CALIBRATE}"
        ) from error
    if frame.schema not in _KNOWN_SCHEMAS:
        raise DataError(
            f"{path} has the columns {', '.join(frame.columns)}, expected {', '.join(SCHEMA)}, "
            f"or they have other types; collect again with {CALIBRATE}"
        )
    try:
        samples = tuple(Sample.from_row(row) for row in frame.iter_rows(named=True))
    except DataError as error:
        raise DataError(f"{path} is damaged: {error}; collect again with {CALIBRATE}") from error
    for sample in samples:
        check_sample(sample, path)
    return CollectedCosts(samples, manifest)
