"""What was fitted or trained, on disk: arrays in `<name>.safetensors`, all else in `<name>.json`.

Cost models and policies are looked for in the working directory's `calibration/`, where the
commands that make them put them, then among those of the package.
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

from dlrm_sharded.context import RunContext
from dlrm_sharded.errors import DataError
from dlrm_sharded.json_files import write_json

log = logging.getLogger(__name__)

FORMAT = 1
CALIBRATE = "`make calibrate` (scripts/collect_costs.py, then scripts/fit_cost_model.py)"
REQUIRED = ("hardware", "device", "cores", "optimizer")
SHIPPED = Path(__file__).resolve().parent / "artifacts"
CALIBRATED = Path("calibration")

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """What an artefact is, and what the messages about it say.

    Args:
        name: with which the names of its files begin.
        noun: what such artefacts are called.
        made_with: how one is made.
        of_other_device, of_other_hardware: what that means for a run, and what to do.
        of_other_optimizer: likewise; {optimizer} is the run's.
        required: keys of the json, beside `REQUIRED`.
    """

    name: str
    noun: str
    made_with: str
    of_other_device: str
    of_other_hardware: str
    of_other_optimizer: str
    required: tuple[str, ...] = ()


def cost_model_kind(name: str) -> Kind:
    right_one = "`make calibrate` makes a right one in 10 minutes"
    return Kind(
        name,
        noun="cost model",
        made_with=CALIBRATE,
        of_other_device="its computation says nothing of a run's, and its communication is of "
        f"stated bandwidths; {right_one}",
        of_other_hardware="its times may be wrong by a factor, its order of plans less so; "
        f"{right_one}",
        of_other_optimizer="backward computation may be wrong; `make calibrate "
        "ARGS=collect.optimizer={optimizer}` makes a right one",
        required=("ranges",),
    )


def policy_kind(name: str) -> Kind:
    """Of a policy that is trained by the method of that name."""
    command = f"python scripts/train_policy.py policy={name}"
    train = f"`{command}`"
    elsewhere = (
        "it balances costs as they are there; its plans can be trained, but may be less balanced "
        f"here; {train} makes one of this hardware"
    )
    return Kind(
        name,
        noun="policy",
        made_with=train,
        of_other_device=elsewhere,
        of_other_hardware=elsewhere,
        of_other_optimizer="it balances backward computation as it is there; its plans can be "
        f"trained, but may be less balanced here; `{command} optimizer={{optimizer}}` makes a "
        "right one",
    )


@dataclass(frozen=True, slots=True)
class Artifact:
    """What `read_artifact` reads.

    Args:
        meta: kind, hardware, feature names, how good it is on what it has not seen, and where all
            that is from.
    """

    path: Path
    arrays: Arrays
    meta: dict[str, Any]


def artifact_name(kind: str, hardware: str) -> str:
    """File name without suffix: the name of the kind, and that of the hardware."""
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


def read_artifact(path: Path, *, kind: Kind, features: Mapping[str, Any]) -> Artifact:
    """Read an artefact, checked against its checksum and against what this version computes.

    Args:
        path: of the json.
        kind: that is wanted.
        features: names that the arrays' axes must have.

    Raises:
        DataError: a file is missing, damaged, or of another kind or other features.
    """
    weights = path.with_suffix(".safetensors")
    noun, anew = kind.noun, f"make the {kind.noun} anew with {kind.made_with}"
    try:
        with _locked(path.parent, fcntl.LOCK_SH):
            text, data = path.read_text(), weights.read_bytes()
        meta = json.loads(text)
    except OSError as error:
        raise DataError(
            f"cannot read the {noun} {path} with {weights.name}: {error.strerror}; make one with "
            f"{kind.made_with}"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON; make a {noun} with {kind.made_with}") from error
    if not isinstance(meta, dict) or (meta.get("format"), meta.get("kind")) != (FORMAT, kind.name):
        raise DataError(
            f"{path} is not a {noun} of the kind {kind.name!r} and format {FORMAT}; make one with "
            f"{kind.made_with}"
        )
    if hashlib.sha256(data).hexdigest() != meta.get("sha256"):
        raise DataError(
            f"{weights} ({len(data):,} B) has not the checksum that {path.name} gives: truncated, "
            f"or changed since; {anew}"
        )
    if missing := [key for key in (*REQUIRED, *kind.required) if key not in meta]:
        raise DataError(f"{path} does not say {', '.join(missing)}; {anew}")
    if meta.get("features") != json.loads(json.dumps(features)):
        raise DataError(f"{path} is fitted to other features than this version computes; {anew}")
    try:
        return Artifact(path, load(data), meta)
    except SafetensorError as error:
        raise DataError(f"{weights} is no safetensors file ({error}); {anew}") from error


def find_artifact(kind: Kind, hardware: str | None, device: str) -> tuple[Path, bool]:
    """That of a hardware, or one of the same device type; and whether it is of the hardware.

    Args:
        hardware: as `device_name` says it; None for any of the device type.
        device: "cpu" or "cuda".

    Raises:
        DataError: there is none at all of this kind.
    """
    found: list[tuple[bool, bool, Path]] = []
    for folder in (CALIBRATED, SHIPPED):
        for path in sorted(folder.glob(f"{kind.name}-*.json")):
            meta = _meta_or_nothing(path)
            # one that cannot be read goes by its name, so that who needs it is told
            is_of_hardware = hardware is not None and (
                meta["hardware"] == hardware
                if "hardware" in meta
                else path.stem == artifact_name(kind.name, hardware)
            )
            found.append((is_of_hardware, meta.get("device") == device, path))
    if not found:
        raise DataError(
            f"there is no {kind.noun} of the kind {kind.name!r}, in {CALIBRATED}/ or in the "
            f"package; make one with {kind.made_with}"
        )
    is_of_hardware, _, path = max(found, key=lambda entry: entry[:2])
    return path, is_of_hardware


def load_artifact(
    artifact: str | None,
    kind: Kind,
    features: Mapping[str, Any],
    context: RunContext,
) -> Artifact:
    """Read a named artefact, or that of the run's hardware; warn where it is of something else.

    Raises:
        DataError: it is missing, damaged, or of another kind or other features.
    """
    hardware, device, optimizer = context.hardware, context.device, context.optimizer
    path = Path(artifact) if artifact else find_artifact(kind, hardware, device)[0]
    found = read_artifact(path, kind=kind, features=features)
    of_artifact, of_run = found.meta["hardware"], hardware
    if device == "cpu":
        of_artifact = f"{of_artifact}, {found.meta['cores']} cores"
        of_run = f"{of_run}, {len(os.sched_getaffinity(0))} cores"
    is_of_device = found.meta["device"] == device
    if hardware is not None and not (is_of_device and of_artifact == of_run):
        log.warning(
            "the %s is of %s, the run is on %s: %s",
            kind.noun,
            of_artifact,
            of_run,
            kind.of_other_hardware if is_of_device else kind.of_other_device,
        )
    if optimizer not in (None, found.meta["optimizer"]):
        log.warning(
            "the %s is of the fused optimizer %s, the run has %s: %s",
            kind.noun,
            found.meta["optimizer"],
            optimizer,
            kind.of_other_optimizer.format(optimizer=optimizer),
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
