"""Artefacts whose checksum is right, but whose content cannot be used; and damaged ones."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dlrm_sharded import DataError, RunContext, learned_cost_model
from dlrm_sharded.cost.neuroshard_paper import paper_cost_model
from dlrm_sharded.hardware.artifact import CALIBRATED, SHIPPED, Arrays, write_artifact
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.rl.policy import load_policy
from tests.unit.hardware.test_artifact import header

Load = Callable[[RunContext, str | None], object]


def loader_of_policy(method: str) -> Load:
    return lambda context, artifact: load_policy(method, artifact, context)


LOADERS: dict[str, Load] = {
    "learned": learned_cost_model,
    "neuroshard_paper": paper_cost_model,
    "autoshard": loader_of_policy("autoshard"),
    "dreamshard": loader_of_policy("dreamshard"),
}
CPU = RunContext(device="cpu")


@functools.cache
def shipped(kind: str) -> Path:
    (path,) = SHIPPED.glob(f"{kind}-*.safetensors")
    return path


def meta_of(kind: str) -> dict[str, Any]:
    """What the writer of a shipped artefact was given beside its arrays."""
    fields = header(shipped(kind))
    return {key: value for key, value in fields.items() if key not in ("format", "sha256")}


def rewritten(folder: Path, kind: str, arrays: Arrays, **changes: Any) -> Path:
    """The shipped artefact with other content, as its writer would have written it."""
    return write_artifact(folder, f"{kind}-x", arrays, meta_of(kind) | changes)


def filled(value: float) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {key: np.full_like(array, value) for key, array in arrays.items()}


def one_number(value: float) -> Callable[[Arrays], Arrays]:
    """One number of the first array is another."""

    def change(arrays: Arrays) -> Arrays:
        first = min(arrays)
        changed = arrays[first].copy()
        changed.flat[0] = value
        return {**arrays, first: changed}

    return change


CHANGES: dict[str, Callable[[Arrays], Arrays]] = {
    "nan": filled(np.nan),
    "infinite": filled(np.inf),
    "zero": filled(0.0),
    "absurd": filled(1e30),
    "one_nan": one_number(np.nan),
    "one_infinite": one_number(-np.inf),
    "one_absurd": one_number(1e30),
    "none": lambda arrays: {},
    "one_missing": lambda arrays: dict(list(arrays.items())[1:]),
    "misshapen": lambda arrays: {key: array.ravel()[:1] for key, array in arrays.items()},
    "transposed": lambda arrays: {key: array.T for key, array in arrays.items()},
    "booleans": lambda arrays: {key: array.astype(bool) for key, array in arrays.items()},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", LOADERS)
def test_arrays_that_cannot_be_used(
    kind: str, change: Callable[[Arrays], Arrays], tmp_path: Path
) -> None:
    path = rewritten(tmp_path, kind, change(load_file(shipped(kind))))
    with pytest.raises(DataError, match=r"is damaged|is no usable") as error:
        LOADERS[kind](CPU, str(path))
    assert str(path) in str(error.value)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut_in_the_header": lambda data: data[:1500],
    "cut": lambda data: data[:-8],
    "flipped": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "other_hardware": lambda data: data.replace(b"cpu: AMD EPYC", b"cpu: AMD EPYX", 1),
    "other_device": lambda data: data.replace(rb"\"device\": \"cpu\"", rb"\"device\": \"cpx\""),
}


@pytest.mark.parametrize("hardware", [None, Hardware("cpu: AMD EPYC")], ids=["unknown", "known"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_damaged_calibration_is_no_reason_to_use_the_packages(
    kind: str,
    damage: Callable[[bytes], bytes],
    hardware: Hardware | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the hardware is not known, as for a plan that is made without a run."""
    monkeypatch.chdir(tmp_path)
    CALIBRATED.mkdir()
    data = shipped(kind).read_bytes()
    assert damage(data) != data
    (CALIBRATED / shipped(kind).name).write_bytes(damage(data))
    with pytest.raises(DataError, match=rf"calibration/{kind}-cpu_amd_epyc"):
        LOADERS[kind](RunContext("cpu", hardware, calibrated=CALIBRATED), None)
