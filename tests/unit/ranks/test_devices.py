"""The device that ranks compute on: never the CPU for want of a driver or a wheel."""

import itertools
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dlrm_sharded.commands import check_install
from dlrm_sharded.commands.calibrate import CPU_RANKS, default_num_ranks
from dlrm_sharded.commands.check_install import installation
from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks import devices, gpus, version_sets
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.distributed import rank_from_environment
from tests.nvidia import install_nvidia_smi


class Machine:
    """Sets what this process finds: GPUs, their driver, and what torch can do with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self._folder = monkeypatch, folder
        monkeypatch.setattr(gpus, "DEVICE_FILES", folder)
        monkeypatch.setattr(gpus, "DRIVER_FILE", folder / "version")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("DLRM_SHARDED_DEVICE", raising=False)
        self.has(num_gpus=0)

    def has(
        self, num_gpus: int, driver: str = "580.65.06", cuda: str | None = "13.0", *, usable=False
    ) -> None:
        path = install_nvidia_smi(self._folder, num_gpus, driver=driver)
        self._monkeypatch.setenv("PATH", path)
        self._monkeypatch.setattr(torch.version, "cuda", cuda)
        for name, answer in {
            "is_available": usable,
            "device_count": num_gpus if usable else 0,
            "get_device_name": "NVIDIA H100",
            "init": RuntimeError("system not yet initialized. Error 802"),
        }.items():
            self._monkeypatch.setattr(torch.cuda, name, Mock(side_effect=itertools.repeat(answer)))

    def demands(self, device: str, *, listed: str | None = None) -> None:
        self._monkeypatch.setenv("DLRM_SHARDED_DEVICE", device)
        if listed is not None:
            self._monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)


@pytest.fixture
def machine(no_torchrun: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_gpus_that_torch_can_use(machine):
    machine.has(num_gpus=8, usable=True)
    assert device_type() == "cuda"
    assert rank_from_environment().device == torch.device("cuda", 0)
    assert default_num_ranks() == 8


def test_a_process_of_a_group_keeps_its_gpu(rank, machine, monkeypatch):
    """One of a user's, whose launcher may show each rank its own GPU alone."""
    machine.has(num_gpus=8, usable=True)
    monkeypatch.setenv("LOCAL_RANK", "9")
    assert rank_from_environment().device == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert rank_from_environment().device == torch.device("cuda", 5)
    monkeypatch.setattr(torch.distributed.group.WORLD, "bound_device_id", torch.device("cuda", 6))
    assert rank_from_environment().device == torch.device("cuda", 6)


def test_no_gpus(machine):
    assert device_type() == "cpu"
    assert default_num_ranks() == CPU_RANKS


def test_hidden_gpus(machine, monkeypatch):
    machine.has(num_gpus=8, driver="535.104.05")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert rank_from_environment().device == torch.device("cpu")


@pytest.mark.parametrize("usable", [True, False])
def test_the_cpu_on_demand(usable, machine):
    machine.has(num_gpus=8, driver="535.104.05", usable=usable)
    machine.demands("cpu")
    assert rank_from_environment().device == torch.device("cpu")
    assert default_num_ranks() == CPU_RANKS


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "old_driver": (
        {"driver": "535.104.05"},
        r"cannot use the visible GPUs \(8; driver 535\.104\.05\): system not yet initialized; "
        r"install a newer driver, or .* for an older CUDA",
    ),
    "cpu_wheel": (
        {"cuda": None},
        r"cannot use the visible GPUs \(8; driver 580\.65\.06\): .*; run: pip uninstall -y torch "
        r"&& .* && pip install \"dlrm_sharded\[cuda\]\"",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.parametrize("function", [rank_from_environment, default_num_ranks, installation])
def test_gpus_that_torch_cannot_use(name, function, machine):
    found, message = UNUSABLE[name]
    machine.has(num_gpus=8, **found)
    with pytest.raises(ConfigError, match=f"{message}, or set DLRM_SHARDED_DEVICE=cpu"):
        function()


def test_gpus_whose_driver_does_not_answer(machine, tmp_path):
    (tmp_path / "nvidia0").touch()
    with pytest.raises(ConfigError, match=r"cannot use the visible GPUs \(1; driver unknown\)"):
        device_type()


@pytest.mark.parametrize(("num_gpus", "listed"), [(0, None), (8, ""), (8, "-1")])
def test_demanded_gpus_that_are_not_there(num_gpus, listed, machine):
    machine.has(num_gpus=num_gpus)
    machine.demands("cuda", listed=listed)
    with pytest.raises(ConfigError, match=rf"visible GPUs \(0; .*_DEVICES is {listed!r}, or set"):
        device_type()


def test_installation_on_gpus(machine, monkeypatch):
    machine.has(num_gpus=8, usable=True)
    monkeypatch.setattr(check_install, "_check_fbgemm", lambda *_: None)  # would need the GPU
    line = installation()
    assert line.startswith("computes on 8 x NVIDIA H100, driver 580.65.06, CUDA 13.0; python 3.")
    assert f"torch {version('torch')}, " in line
    assert "\n" not in line


def test_installation_on_a_cpu(machine):
    line = installation()
    assert line.startswith("computes on the CPU (")
    for package in ("torch", "torchrec", "fbgemm-gpu-cpu"):
        assert f"{package} " in line


@pytest.mark.parametrize(
    ("fbgemm", "limit"), [("1.6.0+cu130", 1024), ("1.8.0", None), ("0+cpu", None)]
)
def test_an_old_fbgemm_looks_up_fewer_columns(
    monkeypatch: pytest.MonkeyPatch, fbgemm: str, limit: int | None
) -> None:
    """Wrong vectors are worse than an error, so its kernels get no shard as wide as they take."""
    monkeypatch.setattr(version_sets, "readable_versions", lambda _: {"fbgemm-gpu": fbgemm})
    assert devices.column_limit("cuda") == limit
    assert devices.column_limit("cpu") is None
