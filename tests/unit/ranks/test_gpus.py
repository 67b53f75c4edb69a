"""The GPUs that CUDA would see, under a synthetic nvidia-smi and synthetic environments."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_sharded.ranks import gpus
from dlrm_sharded.ranks.gpus import (
    GpuState,
    GpuStates,
    cores_near_gpus,
    driver_version,
    gpu_state,
    visible_gpus,
)
from tests.nvidia import PARTS, UUIDS, install_nvidia_smi
from tests.preloaded import ROOT

DRIVER_FILES = {
    "open": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
    "closed": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sat Aug 19 01:15:15 UTC",
}


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever this machine has."""
    (tmp_path / "dev").mkdir()
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setattr(gpus, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_driver: None) -> None:
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path, 4))


VISIBLE = [
    (None, ["0", "1", "2", "3"]),
    ("", []),
    ("3, 1", ["3", "1"]),
    ("0,-1,2", ["0"]),
    ("4", []),
    (f"GPU-1,{UUIDS[2]}", ["GPU-1", UUIDS[2]]),
    (PARTS[1], [PARTS[1]]),
]
"""Maps the GPUs that are listed to those that are visible."""


@pytest.mark.parametrize(("listed", "visible"), VISIBLE, ids=str)
def test_visible(listed, visible, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path, 4))
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(environment) == visible


@pytest.mark.usefixtures("four_gpus")
def test_the_cpu_can_be_demanded():
    assert visible_gpus({"DLRM_SHARDED_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "0"}) == []
    assert visible_gpus({"DLRM_SHARDED_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "0"}) == ["0"]


def test_a_machine_without_gpus():
    assert visible_gpus({}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == []
    assert driver_version() is None


@pytest.mark.parametrize("has_nvidia_smi", [True, False])
def test_gpus_of_a_driver_that_does_not_answer(has_nvidia_smi, monkeypatch, tmp_path):
    """They are there, so nobody must mistake the machine for one without GPUs."""
    if has_nvidia_smi:
        monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path, 0))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == ["1"]


@pytest.mark.parametrize("kind", DRIVER_FILES)
def test_driver_of_the_kernel(kind, tmp_path):
    (tmp_path / "version").write_text(f"{DRIVER_FILES[kind]}\nGCC version:  gcc version 12.3.0\n")
    assert driver_version() == "580.65.06"


CLOCKS = "--query-gpu=clocks.sm,clocks.mem,clocks_event_reasons.active"


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("1980, 2619, 0x0000000000000004", GpuState(1980, 2619, 4)),
        ("345, 2619, 0x00000000000000A1", GpuState(345, 2619, 0xA1)),
        ("[N/A], [N/A], [N/A]", None),
    ],
)
def test_the_state_of_a_gpu(line, state, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path, 1, answers={CLOCKS: line}))
    assert gpu_state(UUIDS[0]) == state


@pytest.mark.parametrize(
    ("before", "after", "is_disturbed"),
    [
        ((1980, 2619, 0x0), (1980, 2619, 0x0), False),
        ((1980, 2619, 0x0), (1950, 2619, 0x4), False),
        ((1980, 2619, 0x0), (1755, 2619, 0x4), True),
        ((1755, 2619, 0x4), (1755, 2619, 0x4), False),
        ((1200, 2619, 0x0), (1980, 2619, 0x0), True),
        ((1980, 2619, 0x0), (1980, 1593, 0x0), True),
        ((345, 2619, 0x1), (1980, 2619, 0x0), False),
        *(((1980, 2619, bit), (1980, 2619, 0x0), True) for bit in (0x8, 0x20, 0x40, 0x80)),
        ((1980, 2619, 0x0), (1980, 2619, 0x20), True),
        ((345, 2619, 0x1), (1980, 2619, 0x40), True),
        ((0, 0, 0x0), (0, 0, 0x0), False),
    ],
)
def test_which_states_disturb_a_measurement(before, after, is_disturbed):
    assert GpuStates(GpuState(*before), GpuState(*after)).is_disturbed == is_disturbed


BUS_IDS = [f"00000000:{bus}:00.0" for bus in ("17", "65", "CA", "E3")]


@pytest.mark.parametrize(
    ("nodes", "mine", "numactl", "cores"),
    [
        ((0, 0, 1, 1), range(16), "echo works", 4),
        ((0, 0, 1), range(16), "echo works", 4),
        ((1,), range(16), "echo works", 8),
        ((0, 0, 1, 1), range(10), "echo works", 1),
        ((0, 0, 1, 1), range(8), "echo works", 0),  # no core of the second node
        ((0, 0, 1, -1), range(16), "echo works", 0),  # a virtual machine
        ((0, 0, 1, None), range(16), "echo works", 0),
        ((0, 0, 1, 1), range(16), "echo No NUMA support available on this system.; exit 1", 0),
        ((), range(16), "echo works", 0),  # a part of a GPU
    ],
)
def test_cores_on_the_nodes_of_gpus(nodes, mine, numactl, cores, monkeypatch, tmp_path):
    """The host has two nodes with eight cores each. Where the number is 0, torch would end the job,
    or bind all ranks to the first node."""
    monkeypatch.setattr(gpus, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "NUMA_NODES", tmp_path)
    for core in range(16):
        (tmp_path / f"node{core // 8}" / f"cpu{core}").mkdir(parents=True)
    (tmp_path / "node0" / "cpulist").touch()
    for bus_id, node in zip(BUS_IDS, nodes, strict=False):
        if node is not None:
            (tmp_path / f"0000:{bus_id[9:].lower()}").mkdir()
            (tmp_path / f"0000:{bus_id[9:].lower()}" / "numa_node").write_text(f"{node}\n")
    (tmp_path / "numactl").write_text(f"#!/bin/sh\n{numactl}\n")
    (tmp_path / "numactl").chmod(0o755)
    shown = {"--query-gpu=pci.bus_id": "\n".join(BUS_IDS[: len(nodes)])}
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path, 4, answers=shown))
    monkeypatch.setattr(gpus.os, "sched_getaffinity", lambda pid: {*mine})
    visible = [str(number) for number in range(len(nodes))] or PARTS[:1]
    assert cores_near_gpus(visible) == cores
    (tmp_path / "node1").rename(tmp_path / "memory1")
    assert cores_near_gpus(visible) == 0, "there is one node"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., str]:
    """Call make as a user does on a machine with four GPUs, before an environment is installed."""

    def output(*arguments: str, listed: str | None) -> str:
        environment = {"PATH": install_nvidia_smi(tmp_path, 4)}
        if listed is not None:
            environment["CUDA_VISIBLE_DEVICES"] = listed
        # -S hides the packages that this test's Python has.
        command = ["make", f"PYTHON={sys.executable} -S", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    return output


DRY_RUN = ("--dry-run", "--always-make")


@pytest.mark.parametrize(("listed", "ranks"), [(None, 4), ("0,1", 2), ("GPU-3", 1), ("", None)])
def test_make_starts_a_rank_for_every_visible_gpu(listed, ranks, make):
    commands = make(*DRY_RUN, "run", listed=listed)
    assert f"--nproc-per-node {ranks or 2} " in commands
    assert ("experiment=gpu_demo" in commands) == (ranks is not None)
    assert ("requirements/cuda.txt" in commands) == (ranks is not None)


def test_make_leaves_the_ranks_of_a_sweep_to_its_experiment_unless_they_are_given(make):
    """The launcher's default is one for each GPU."""
    assert "hydra.launcher.j" not in make(*DRY_RUN, "sweep", listed=None)
    assert " hydra.launcher.j=1x3 " in make(*DRY_RUN, "sweep", "NPROC=3", listed=None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_make_demands_the_device_that_it_was_given(device, make):
    """Although the other one is what it would choose."""
    listed = None if device == "cpu" else ""
    assert f"requirements/{device}.txt" in make(*DRY_RUN, "run", f"DEVICE={device}", listed=listed)
    probe = "--eval=probe: ; @echo demands $$DLRM_SHARDED_DEVICE"
    assert make(probe, "probe", f"DEVICE={device}", listed=listed) == f"demands {device}\n"


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda-2.11"])
def test_every_set_of_versions_has_an_environment(name, make):
    chosen = f"REQUIREMENTS=requirements/{name}.txt"
    commands = make(*DRY_RUN, "test", chosen, listed="")
    assert f".venv-{name}/bin/python -m pytest" in commands
    assert {word.partition("/")[0] for word in commands.split() if word.startswith(".venv-")} == {
        f".venv-{name}"
    }
