"""Artefacts whose checksum is right, but whose content cannot be used; and damaged ones."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_sharded import DataError, RunContext, learned_cost_model
from dlrm_sharded.cost.neuroshard import neuroshard_cost_model
from dlrm_sharded.hardware.artifact import CALIBRATED, SHIPPED
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.rl.policy import load_policy

Load = Callable[[RunContext, str | None], object]


def loader_of_policy(method: str) -> Load:
    return lambda context, artifact: load_policy(method, artifact, context)


LOADERS: dict[str, Load] = {
    "learned": learned_cost_model,
    "neuroshard": neuroshard_cost_model,
    "autoshard": loader_of_policy("autoshard"),
    "dreamshard": loader_of_policy("dreamshard"),
}


@functools.cache
def shipped(kind: str) -> Path:
    (path,) = SHIPPED.glob(f"{kind}-*.safetensors")
    return path


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
