"""Damaged artifacts of every kind are an error that names the file."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_sharded import DataError, RunContext, learned_cost_model
from dlrm_sharded.cost.published_nets import neuroshard_cost_model
from dlrm_sharded.hardware.artifact import CALIBRATED, SHIPPED
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.rl.learned_policy import load_policy
from tests.unit.damage import change_a_byte

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


@pytest.mark.parametrize("hardware", [None, Hardware("cpu: AMD EPYC")], ids=["unknown", "known"])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_damaged_calibration_is_no_reason_to_use_the_packages(
    kind: str, hardware: Hardware | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the hardware is not known, as for a plan that is made without a run."""
    monkeypatch.chdir(tmp_path)
    CALIBRATED.mkdir()
    shutil.copy(shipped(kind), CALIBRATED)
    change_a_byte(CALIBRATED / shipped(kind).name)
    with pytest.raises(DataError, match=rf"calibration/{kind}-cpu_amd_epyc"):
        LOADERS[kind](RunContext("cpu", hardware, calibrated=CALIBRATED), None)
