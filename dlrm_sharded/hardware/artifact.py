"""Artifacts: fitted cost models and trained policies, each in one safetensors file.

The header of the file says on what hardware, and from what, the artifact was made. Artifacts are
looked up in the folder that a run names, then in the package. Commands name `calibration/` of the
working directory, where they write artifacts; the Python API names none by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from dlrm_sharded.files.errors import DataError, check_path
from dlrm_sharded.files.json_files import replace_file
from dlrm_sharded.hardware.artifact_kinds import Kind
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.hardware.match import EXCHANGE, Match, compare

log = logging.getLogger(__name__)

ARTIFACT_FORMAT = 2
HEADER = "dlrm_sharded"
"""Key of the file's header whose value is a JSON object that describes the arrays."""

ARTIFACT_SUFFIX = ".safetensors"
SHIPPED = Path(__file__).resolve().parents[1] / "artifacts"
CALIBRATED = Path("calibration")

Arrays = dict[str, NDArray[Any]]
Features = Mapping[str, Any] | Callable[[str], Mapping[str, Any]]
"""Names of the arrays' axes, or a function of the artifact's device that returns them."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """The content of an artifact's file.

    Args:
        meta: kind, hardware, names of features, accuracy on held-out data, and provenance.
        match: whether it was made on the run's hardware, or why not; None if it was read without a
            run.
    """

    path: Path
    arrays: Arrays
    meta: dict[str, Any]
    match: Match | None = None

    @property
    def hardware(self) -> Hardware:
        """Return the hardware that the artifact was made on."""
        return Hardware.from_meta(self.meta)


def artifact_name(kind: str, hardware: str) -> str:
    """Return the file name without suffix: the names of the kind and of the hardware."""
    return f"{kind}-{re.sub('[^a-z0-9]+', '_', hardware.lower()).strip('_')}"


def name_in_folder(folder: Path, kind: Kind, hardware: Hardware) -> str:
    """Return a file name for an artifact that no artifact of other hardware already has."""
    name, ours = artifact_name(kind.name, hardware.name), hardware.fingerprint
    theirs = None
    with contextlib.suppress(DataError):
        theirs = Hardware.from_meta(_read(folder / f"{name}{ARTIFACT_SUFFIX}", kind)[1]).fingerprint
    return name if ours is None or theirs in (None, ours) else f"{name}-{ours.id}"


def write_artifact(folder: Path, name: str, arrays: Arrays, meta: Mapping[str, Any]) -> Path:
    """Write the file, whole or not at all, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    fields = {"format": ARTIFACT_FORMAT, **meta}
    header = json.dumps({**fields, "sha256": checksum(contiguous, fields)})
    path = folder / f"{name}{ARTIFACT_SUFFIX}"
    replace_file(path, save(contiguous, metadata={HEADER: header}))
    return path


def read_artifact(path: Path, *, kind: Kind, features: Features) -> Artifact:
    """Read an artifact and check its checksum, its kind, its features and its numbers.

    Args:
        features: as this version computes them.

    Raises:
        DataError: the file is missing, damaged, or of another kind or other features.
    """
    try:
        arrays, meta = _read(path, kind)
        expected = features(meta["device"]) if callable(features) else features
        if meta.get("features") != json.loads(json.dumps(expected)):
            raise DataError(f"{path} was fitted to other features than this version computes")
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise DataError(f"{path} has numbers that are not finite")
    except DataError as error:
        raise DataError(f"{error}; make the {kind.noun} with {kind.made_with}") from error
    return Artifact(path, arrays, meta)


@contextlib.contextmanager
def built_from(artifact: Artifact, kind: Kind) -> Iterator[None]:
    """Report the artifact as damaged if the block cannot build or try what it describes.

    Raises:
        DataError: an array or a field is missing or has a wrong shape, or a result is not a number.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise DataError(
            f"{artifact.path} is no usable {kind.noun} ({type(e).__name__}: {reason}); "
            f"make one with {kind.made_with}"
        ) from e


def find_artifact(
    kind: Kind, hardware: Hardware | None, device: str, calibrated: Path | None = None
) -> Path:
    """Return the path of the artifact that fits best.

    That is one of the same hardware, else one with the same fingerprint, else the one of the same
    type of device whose probe is the closest, else any. Of several artifacts of the same hardware,
    those whose exchanges were probed between as many ranks come first. Older files, which have no
    probe, come last; among them, those with the name of the hardware come first.

    Args:
        hardware: what the ranks compute on; None for any of the device type.
        device: "cpu" or "cuda".
        calibrated: see `RunContext`.

    Raises:
        DataError: there is no artifact of this kind, or one that is damaged.
    """
    metas = dict(_metas(kind, calibrated))
    if not metas:
        raise DataError(
            f"there is no {kind.noun} of the kind {kind.name!r}, "
            f"{f'in {calibrated}/ or ' if calibrated else ''}in the package; make one with "
            f"{kind.made_with}"
        )

    def fitness(path: Path) -> tuple[float, ...]:
        theirs = Hardware.from_meta(metas[path])
        match = compare(hardware, theirs)
        return (
            match.is_same,
            match.has_same_fingerprint,
            metas[path]["device"] == device,
            match.has_same_fingerprint and EXCHANGE in match.speeds,
            -match.distance,
            hardware is not None and hardware.name == theirs.name,
        )

    return max(metas, key=fitness)


def _metas(kind: Kind, calibrated: Path | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files of a kind with their descriptions, those that were made here first.

    Raises:
        DataError: a file is damaged.
    """
    for folder in [calibrated, SHIPPED] if calibrated else [SHIPPED]:
        for path in sorted(folder.glob(f"{kind.name}-*{ARTIFACT_SUFFIX}")):
            try:
                yield path, _read(path, kind)[1]
            except DataError as error:
                advice = f"remove the file, or make the {kind.noun} with {kind.made_with}"
                raise DataError(f"{error}; {advice}") from error


def load_artifact(
    artifact: str | None, kind: Kind, features: Features, context: RunContext, *, warns: bool = True
) -> Artifact:
    """Read a named artifact, or the one that fits the run's hardware; warn if the run differs.

    Args:
        warns: whether to log which one it is, and to warn; the caller leaves that out if
            measurements of the run's hardware make up for what differs.

    Raises:
        DataError: it is missing, damaged, or of another kind or other features.
    """
    if artifact is not None:
        check_path(f"the artifact of the {kind.noun}", artifact)
    if artifact:
        path = Path(artifact)
    else:
        path = find_artifact(kind, context.hardware, context.device, context.calibrated)
    read = read_artifact(path, kind=kind, features=features)
    match = compare(context.hardware, read.hardware)
    loaded = dataclasses.replace(read, match=match)
    name = path.name if path.parent == SHIPPED else path
    say, warn = (log.info, log.warning) if warns else (log.debug, log.debug)
    say("%s: %s, of %s", kind.noun, name, loaded.meta["hardware"])
    for text in caveats_of(loaded, kind, context):
        warn("%s", text)
    return loaded


def caveats_of(loaded: Artifact, kind: Kind, context: RunContext) -> Iterator[str]:
    """Yield caveats for an artifact of another device, other hardware or another optimizer.

    Without hardware, as for a plan that is made elsewhere, the device and the optimizer are all
    that can differ.
    """
    assert loaded.match is not None
    prior = f"the {kind.noun} is a prior, made on {loaded.meta['hardware']}"
    if loaded.meta["device"] != context.device:
        here = context.device if context.hardware is None else context.hardware.name
        yield f"{prior}, and the run is on {here}: {kind.other_device}"
    elif context.hardware is not None and not loaded.match.is_same:
        yield f"{prior}: {kind.other_hardware}"
    if context.optimizer not in (None, loaded.meta["optimizer"]):
        what_to_do = kind.other_optimizer.format(optimizer=context.optimizer)
        yield (
            f"the {kind.noun} belongs to the fused optimizer {loaded.meta['optimizer']}, the run "
            f"has {context.optimizer}: {what_to_do}"
        )


def _read(path: Path, kind: Kind) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays of a file, and their description without the checksum.

    Raises:
        DataError: the file is missing, damaged, or not of the kind.
    """
    try:
        arrays, meta = _contents(path)
    except OSError as error:
        raise DataError(f"cannot read the {kind.noun} {path}: {error.strerror or error}") from error
    except (SafetensorError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is damaged, or no safetensors file ({reason})") from error
    if (meta.get("format"), meta.get("kind")) != (ARTIFACT_FORMAT, kind.name):
        raise DataError(
            f"{path} is not a {kind.noun} of the kind {kind.name!r} and format {ARTIFACT_FORMAT}"
        )
    written = meta.pop("sha256", None)
    if checksum(arrays, meta) != written:
        raise DataError(f"{path} was changed since it was written")
    if missing := [key for key in kind.required if key not in meta]:
        raise DataError(f"{path} lacks the fields {', '.join(missing)}")
    return arrays, meta


def _contents(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays of a file and the description in its header, which may be empty."""
    with safe_open(path, framework="numpy") as file:
        meta = json.loads((file.metadata() or {}).get(HEADER, "{}"))
        return {key: file.get_tensor(key) for key in file.keys()}, dict(meta)  # noqa: SIM118


def artifact_kind(path: Path) -> str | None:
    """Return the name of the kind that an artifact's header states; None if it cannot be read."""
    try:
        return str(_contents(path)[1].get("kind"))
    except (OSError, SafetensorError, TypeError, ValueError):
        return None


def checksum(arrays: Arrays, fields: Mapping[str, Any]) -> str:
    """Return the hash of the arrays and of their description."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for key in sorted(arrays):
        array = arrays[key]
        digest.update(f"{key} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
