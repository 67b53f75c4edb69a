"""A fitted cost model on disk: arrays in `<name>.safetensors`, all else in `<name>.json`.

Models are looked for in the working directory's `calibration/`, where `make calibrate` puts them,
then among those of the package.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dlrm_sharded.cost.samples import CALIBRATE
from dlrm_sharded.errors import DataError
from dlrm_sharded.plan import write_json

log = logging.getLogger(__name__)

FORMAT = 1
REQUIRED = ("hardware", "device", "cores", "optimizer", "ranges")
SHIPPED = Path(__file__).resolve().parents[1] / "artifacts"
CALIBRATED = Path("calibration")

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Artifact:
    """What `read_artifact` reads.

    Args:
        meta: kind, hardware, feature names, fitted ranges, held-out errors and where they are from.
    """

    path: Path
    arrays: Arrays
    meta: dict[str, Any]


def artifact_name(kind: str, hardware: str) -> str:
    """File name without suffix: the model's kind and the hardware's name."""
    return f"{kind}-{re.sub('[^a-z0-9]+', '_', hardware.lower()).strip('_')}"


def write_artifact(folder: Path, name: str, arrays: Arrays, meta: Mapping[str, Any]) -> Path:
    """Write both files, each whole or not at all; gives the path of the json."""
    folder.mkdir(parents=True, exist_ok=True)
    data = save({key: np.ascontiguousarray(array) for key, array in arrays.items()})
    checksum = hashlib.sha256(data).hexdigest()
    path = folder / f"{name}.json"
    with _locked(folder, fcntl.LOCK_EX):
        partial = folder / f".{name}.{os.getpid()}.tmp"
        partial.write_bytes(data)
        partial.replace(path.with_suffix(".safetensors"))
        write_json(path, {"format": FORMAT, **meta, "sha256": checksum})
    return path


def read_artifact(path: Path, *, kind: str, features: Mapping[str, Any]) -> Artifact:
    """Read a fitted model, checked against its checksum and against what this version computes.

    Args:
        path: of the json.
        kind: of model that is wanted.
        features: names that the arrays' axes must have.

    Raises:
        DataError: a file is missing, damaged, or of another kind or other features.
    """
    weights = path.with_suffix(".safetensors")
    try:
        with _locked(path.parent, fcntl.LOCK_SH):
            text, data = path.read_text(), weights.read_bytes()
        meta = json.loads(text)
    except OSError as error:
        raise DataError(
            f"cannot read the cost model {path} with {weights.name}: {error.strerror}; make one "
            f"with {CALIBRATE}"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON; make a cost model with {CALIBRATE}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or meta.get("kind") != kind:
        raise DataError(
            f"{path} is not a cost model of the kind {kind!r} and format {FORMAT}; make one with "
            f"{CALIBRATE}"
        )
    if hashlib.sha256(data).hexdigest() != meta.get("sha256"):
        raise DataError(
            f"{weights} ({len(data):,} B) has not the checksum that {path.name} gives: truncated, "
            f"or changed since; make the cost model anew with {CALIBRATE}"
        )
    if missing := [key for key in REQUIRED if key not in meta]:
        raise DataError(
            f"{path} does not say {', '.join(missing)}; make the cost model anew with {CALIBRATE}"
        )
    if meta.get("features") != json.loads(json.dumps(features)):
        raise DataError(
            f"{path} is fitted to other features than this version computes; make the cost model "
            f"anew with {CALIBRATE}"
        )
    try:
        return Artifact(path, load(data), meta)
    except SafetensorError as error:
        raise DataError(
            f"{weights} is no safetensors file ({error}); make the cost model anew with {CALIBRATE}"
        ) from error


def find_artifact(kind: str, hardware: str | None, device: str) -> tuple[Path, bool]:
    """The model of a hardware, or one of the same device type; and whether it is of the hardware.

    Args:
        hardware: as `device_name` says it; None for any of the device type.
        device: "cpu" or "cuda".

    Raises:
        DataError: there is none at all of this kind.
    """
    found: list[tuple[bool, bool, Path]] = []
    for folder in (CALIBRATED, SHIPPED):
        for path in sorted(folder.glob(f"{kind}-*.json")):
            meta = _meta_or_nothing(path)
            # one that cannot be read goes by its name, so that who needs it is told
            is_of_hardware = hardware is not None and (
                meta["hardware"] == hardware
                if "hardware" in meta
                else path.stem == artifact_name(kind, hardware)
            )
            found.append((is_of_hardware, meta.get("device") == device, path))
    if not found:
        raise DataError(
            f"there is no cost model of the kind {kind!r}, in {CALIBRATED}/ or in the package; "
            f"make one with {CALIBRATE}"
        )
    is_of_hardware, _, path = max(found, key=lambda entry: entry[:2])
    return path, is_of_hardware


def load_artifact(
    artifact: str | None,
    kind: str,
    features: Mapping[str, Any],
    *,
    hardware: str | None,
    device: str,
    optimizer: str | None,
) -> Artifact:
    """A named model, or the one of the hardware; says so where it is of something else.

    Args:
        hardware, optimizer: of the run; None where any will do.

    Raises:
        DataError: it is missing, damaged, or of another kind or other features.
    """
    path = Path(artifact) if artifact else find_artifact(kind, hardware, device)[0]
    found = read_artifact(path, kind=kind, features=features)
    of_model, of_run = found.meta["hardware"], hardware
    if device == "cpu":
        of_model = f"{of_model}, {found.meta['cores']} cores"
        of_run = f"{of_run}, {len(os.sched_getaffinity(0))} cores"
    if hardware is not None and found.meta["device"] != device:
        log.warning(
            "the cost model is of %s, the run is on %s: its computation says nothing of a run's, "
            "and its communication is of stated bandwidths; `make calibrate` makes a right one in "
            "10 minutes",
            of_model,
            of_run,
        )
    elif hardware is not None and of_model != of_run:
        log.warning(
            "the cost model is of %s, the run is on %s: its times may be wrong by a factor, its "
            "order of plans less so; `make calibrate` makes a right one in 10 minutes",
            of_model,
            of_run,
        )
    if optimizer not in (None, found.meta["optimizer"]):
        log.warning(
            "the cost model is of the fused optimizer %s, the run has %s: backward computation may "
            "be wrong; `make calibrate ARGS=collect.optimizer=%s` makes a right one",
            found.meta["optimizer"],
            optimizer,
            optimizer,
        )
    return found


def _meta_or_nothing(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}


@contextlib.contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """One writer or many readers at a time, as two files are one. A disk may know no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
