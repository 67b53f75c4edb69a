"""The versions of torch, FBGEMM and TorchRec that belong together, and how to install them.

Every FBGEMM is built for one minor version of torch, and the requirements of neither FBGEMM nor
TorchRec say for which. `requirements/` and the extras in `pyproject.toml` name the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from dlrm_sharded.files.versions import readable_versions
from dlrm_sharded.ranks.gpus import DEVICE_VARIABLE, visible_gpus

Build = Literal["cpu", "cuda"]

FBGEMM: dict[Build, str] = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
"""The packages of FBGEMM's builds, which both install the module `fbgemm_gpu`."""

PACKAGES = ("torch", *FBGEMM.values(), "torchrec")
TRAINING_MODULES = ("torch", "torchrec", "fbgemm_gpu", "torchmetrics", "tensordict", "torchx")
"""Modules that an installation for planning and reports lacks."""

CPU_BUILD = "+cpu"
"""End of the version of a package without CUDA code."""

STAND_IN = "0+cpu"
"""Version of the empty package `requirements/fbgemm-gpu-shim`."""


SETS = {"2.14.1": ("1.9.0", "1.9.2"), "2.13.0": ("1.8.0", "1.8.0"), "2.11.0": ("1.6.0", "1.6.1")}
"""Versions of FBGEMM and TorchRec that were tested with a version of torch."""

DEFAULTS: dict[Build, str] = {"cuda": "2.14.1", "cpu": "2.13.0"}
"""Versions of torch of the defaults. On CPUs, the row-wise Adagrad of FBGEMM 1.9 takes 1.4 times as
long as that of 1.8."""


def installed_versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed and can be read."""
    return readable_versions(PACKAGES)


def version_problem(installed: Mapping[str, str]) -> str | None:
    """Say in one line why packages do not belong together, and which command mends that.

    Returns None if they belong together, and where none of the versions is known.
    """
    installed = {package: text for package, text in installed.items() if text != STAND_IN}
    torches = {package: _torch_of(package, text) for package, text in installed.items()}
    for_cuda = installed.get(FBGEMM["cuda"], CPU_BUILD)
    if not {*FBGEMM.values()} - {*installed}:
        reason = "both builds of FBGEMM are the module fbgemm_gpu"
    elif installed.get("torch", "").endswith(CPU_BUILD) and not for_cuda.endswith(CPU_BUILD):
        reason = "torch is built for the CPU, and FBGEMM for CUDA"
    elif "torch" in torches and len({*torches.values()}) > 1:
        reason = unknown_torch(installed) or "each FBGEMM is built for one torch"
    else:
        return None
    *others, last = [f"{package} {text}" for package, text in installed.items()]
    listed = f"{', '.join(others)} and {last}"
    return f"{listed} do not belong together: {reason}; run: {repair_command(installed)}"


def unknown_torch(installed: Mapping[str, str]) -> str | None:
    """Say that no FBGEMM is known for the installed torch; None if there is one, or no torch."""
    torch = installed.get("torch")
    if torch is None or _torch_of("torch", torch) is not None:
        return None
    known = ", ".join(map(minor, SETS))
    return f"no FBGEMM is known for torch {minor(torch)}, only for {known}"


def repair_command(installed: Mapping[str, str], build: Build | None = None) -> str:
    """Return the command that leaves one build of FBGEMM and what belongs to it.

    Args:
        build: that of the device; None for what the packages and this machine say.
    """
    removed = " ".join(package for package in FBGEMM.values() if package in installed)
    return f"pip uninstall -y {removed} && {install_command(build or build_of(installed))}"


def install_command(build: Build | None = None) -> str:
    """Return the command that installs what training needs: for this machine, or for a build."""
    build = build or build_of(installed_versions())
    command = f'pip install "dlrm_sharded[{build}]"'
    if build == "cuda":
        return command
    # TorchRec requires FBGEMM's build for CUDA, which would replace the one for the CPU.
    return f"{command} && pip install --no-deps torchrec=={SETS[DEFAULTS[build]][1]}"


def missing_text(error: BaseException | None) -> str | None:
    """Return the message for an error about a missing package of training; None for others."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in TRAINING_MODULES:
            return f"this needs {error.name}, which is not installed; run: {install_command()}"
        error = error.__cause__ or error.__context__
    return None


def build_of(installed: Mapping[str, str]) -> Build:
    """Return the build of FBGEMM for this machine and the packages that are there."""
    demanded = os.environ.get(DEVICE_VARIABLE)
    if demanded == "cpu" or installed.get("torch", "").endswith(CPU_BUILD):
        return "cpu"
    has_build = installed.get(FBGEMM["cuda"], STAND_IN) != STAND_IN
    return "cuda" if demanded == "cuda" or has_build or visible_gpus() else "cpu"


def minor(text: str) -> str:
    """Return 2.14 for the version 2.14.1+cu130."""
    return ".".join(text.split(".")[:2])


def _torch_of(package: str, text: str) -> str | None:
    """Return the torch of `SETS` to which a version belongs, of any patch level and build."""
    for torch, (fbgemm, torchrec) in SETS.items():
        known = {"torch": torch, "torchrec": torchrec}.get(package, fbgemm)
        if minor(known) == minor(text):
            return torch
    return None
