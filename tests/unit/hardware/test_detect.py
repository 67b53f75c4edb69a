"""The hardware of this process, and the probe that is kept until the next boot."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlrm_sharded.files.user_cache import CACHE_VARIABLE
from dlrm_sharded.hardware import detect
from dlrm_sharded.hardware.detect import local_hardware, read_fingerprint
from dlrm_sharded.hardware.match import compare
from dlrm_sharded.hardware.probe import FIGURES, Probe
from dlrm_sharded.hardware.probing import measure_probe
from tests.unit.hardware.synthetic import PROBE

CPU = torch.device("cpu")


class Prober:
    """Counts how often it is asked for a probe."""

    def __init__(self) -> None:
        self.count, self.probe = 0, dataclasses.replace(PROBE, load=0.1)

    def __call__(self, device: torch.device) -> Probe:
        self.count += 1
        return self.probe


@pytest.fixture
def prober(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prober:
    prober = Prober()
    monkeypatch.setattr(detect, "measure_probe", prober)
    monkeypatch.setattr(detect, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "boot_id").write_text("first\n")
    return prober


def cached(tmp_path: Path) -> Path:
    [path] = (tmp_path / "cache").iterdir()
    return path


def test_is_probed_once_a_boot(prober: Prober, tmp_path: Path) -> None:
    found = local_hardware(CPU)
    assert found.probe == prober.probe
    assert found.fingerprint == read_fingerprint(CPU)
    assert local_hardware(CPU) == found
    assert prober.count == 1
    assert compare(found, local_hardware(CPU)).is_same
    (tmp_path / "boot_id").write_text("second\n")
    local_hardware(CPU)
    assert prober.count == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"boot": "first", "probe": 5}'])
def test_a_damaged_cache_is_measured_anew(content: bytes, prober: Prober, tmp_path: Path) -> None:
    local_hardware(CPU)
    cached(tmp_path).write_bytes(content)
    assert local_hardware(CPU).probe == prober.probe
    assert local_hardware(CPU).probe == prober.probe
    assert prober.count == 2


def no_folder(prober: Prober, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")


def no_boot_id(prober: Prober, tmp_path: Path) -> None:
    (tmp_path / "boot_id").unlink()


def much_other_work(prober: Prober, tmp_path: Path) -> None:
    prober.probe = dataclasses.replace(PROBE, load=1e6)


@pytest.mark.parametrize("change", [no_folder, no_boot_id, much_other_work])
def test_what_is_not_kept(
    change: Callable[[Prober, Path], None], prober: Prober, tmp_path: Path
) -> None:
    change(prober, tmp_path)
    for _ in range(2):
        assert local_hardware(CPU).probe == prober.probe
    assert prober.count == 2


def test_a_probe_of_this_machine() -> None:
    probe = measure_probe(CPU)
    assert all(getattr(probe, key) > 0 for key in FIGURES)
    assert probe.exchange is None
