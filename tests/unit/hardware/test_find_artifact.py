"""Artifacts found by the hardware that they were made on, and named after it."""

import dataclasses
from pathlib import Path

import pytest

from dlrm_sharded import DataError, RunContext
from dlrm_sharded.hardware import artifact
from dlrm_sharded.hardware.artifact import (
    artifact_name,
    find_artifact,
    load_artifact,
    write_artifact,
)
from dlrm_sharded.hardware.artifact_kinds import Kind
from dlrm_sharded.hardware.hardware import Hardware
from tests.unit.damage import cut_off
from tests.unit.hardware.synthetic import HARDWARE, ON_GPU, PROBE, with_cpu, with_probe
from tests.unit.hardware.test_artifact import ARRAYS, FEATURES, KIND, POLICY, meta


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("NVIDIA H200", "learned-nvidia_h200"),
        ("cpu: Intel(R) Xeon(R) CPU @ 2.00GHz", "learned-cpu_intel_r_xeon_r_cpu_2_00ghz"),
        ("../evil/", "learned-evil"),
    ],
)
def test_names(hardware: str, name: str) -> None:
    assert artifact_name(KIND.name, hardware) == name


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The working directory's and the package's, with a model of each hardware below."""
    monkeypatch.chdir(tmp_path)
    shipped = tmp_path / "package" / "artifacts"
    monkeypatch.setattr(artifact, "SHIPPED", shipped)
    return tmp_path / artifact.CALIBRATED, shipped


def put(folder: Path, hardware: str, device: str, kind: str = KIND.name) -> Path:
    name = artifact_name(kind, hardware)
    return write_artifact(folder, name, ARRAYS, meta(kind=kind, hardware=hardware, device=device))


def found(hardware: str | None, device: str) -> Path:
    named = None if hardware is None else Hardware(hardware)
    return find_artifact(KIND, named, device, artifact.CALIBRATED).resolve()


def put_of(folder: Path, name: str, hardware: Hardware, device: str = "cpu") -> Path:
    fields = meta(device=device, **hardware.to_meta())
    return write_artifact(folder, f"learned-{name}", ARRAYS, fields)


def test_finds_the_same_hardwares_then_the_closest(folders: tuple[Path, Path]) -> None:
    """By fingerprint and probe, whatever its name is."""
    calibrated, shipped = folders

    def chosen() -> Path:
        return find_artifact(KIND, HARDWARE, "cpu", artifact.CALIBRATED).resolve()

    older = put(calibrated, HARDWARE.name, "cpu")
    put_of(calibrated, "a_gpu", ON_GPU, "cuda")
    assert chosen() == older
    other = with_cpu(with_probe(gather_gb_per_s=3.0), model="1")
    distant = put_of(calibrated, "distant", other)
    assert chosen() == distant
    close = put_of(shipped, "close", with_cpu(with_probe(gather_gb_per_s=1.1), model="2"))
    assert chosen() == close
    unprobed = put_of(shipped, "unprobed", dataclasses.replace(HARDWARE, probe=None))
    assert chosen() == unprobed
    same = put_of(shipped, "same", dataclasses.replace(HARDWARE, name="cpu: y"))
    assert chosen() == same
    nearby = put_of(calibrated, "here", with_probe(gather_gb_per_s=1.2))
    assert chosen() == same, "it is closer"
    same.unlink()
    assert chosen() == nearby


def test_of_the_same_gpus_those_whose_ranks_exchange_come_first(folders: tuple[Path, Path]) -> None:
    """A single GPU, whose other figures may be closer, says nothing of exchanges."""
    calibrated, _ = folders
    alone = dataclasses.replace(PROBE, exchange=None)
    put_of(calibrated, "alone", dataclasses.replace(ON_GPU, probe=alone), "cuda")
    other = with_probe(ON_GPU, copy_gb_per_s=1.1)
    eight = put_of(calibrated, "eight", other, "cuda")
    assert find_artifact(KIND, ON_GPU, "cuda", artifact.CALIBRATED).resolve() == eight


def test_finds_the_hardwares_then_the_device_types_then_any(folders: tuple[Path, Path]) -> None:
    calibrated, shipped = folders
    gpu = put(shipped, "GPU B", "cuda")
    assert found("cpu: x", "cpu") == gpu
    other_cpu = put(shipped, "cpu: y", "cpu")
    put(calibrated, "GPU A", "cuda")
    assert found("cpu: x", "cpu") == other_cpu
    same_cpu = put(shipped, "cpu: x", "cpu")
    assert found("cpu: x", "cpu") == same_cpu
    assert found("GPU B", "cuda") == gpu
    here = put(calibrated, "cpu: x", "cpu")
    assert found("cpu: x", "cpu") == found("cpu: z", "cpu") == found(None, "cpu") == here


def test_a_damaged_model_is_named(folders: tuple[Path, Path]) -> None:
    """Whatever the hardware, as another model would stand in for it without a word."""
    calibrated, shipped = folders
    put(shipped, "cpu: y", "cpu")
    cut_off(put(calibrated, "cpu: x", "cpu"))
    for hardware in ("cpu: x", "cpu: y", None):
        with pytest.raises(DataError, match=r"learned-cpu_x.* is damaged.*; remove the file, or"):
            found(hardware, "cpu")


@pytest.mark.parametrize("hardware", [None, ON_GPU], ids=["unknown", "known"])
@pytest.mark.parametrize("kind", [KIND, POLICY], ids=["cost_model", "policy"])
def test_says_that_it_is_of_another_device(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, kind: Kind, hardware: Hardware
) -> None:
    """Also where the hardware is not known, as for a plan that is made on another machine."""
    write_artifact(folders[1], artifact_name(kind.name, "cpu: y"), ARRAYS, meta(kind=kind.name))
    load_artifact(None, kind, FEATURES, RunContext("cuda", hardware))
    [said] = caplog.messages
    here = "cuda" if hardware is None else "GPU A"
    assert f"the run is on {here}: {kind.other_device}" in said
