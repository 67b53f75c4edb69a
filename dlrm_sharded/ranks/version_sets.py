"""The versions of torch, FBGEMM and TorchRec that fit together, and how to install them.

Every FBGEMM is built for one minor version of torch, but neither FBGEMM nor TorchRec declares which
one it requires. `requirements/` and the extras in `pyproject.toml` name the defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from dlrm_sharded.files.versions import readable_versions
from dlrm_sharded.ranks.gpus import DEVICE_VARIABLE, visible_gpus

Build = Literal["cpu", "cuda"]

FBGEMM: dict[Build, str] = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
"""The packages of FBGEMM's two builds, both of which install the module `fbgemm_gpu`."""

PACKAGES = ("torch", *FBGEMM.values(), "torchrec")
TRAINING_MODULES = ("torch", "torchrec", "fbgemm_gpu", "torchmetrics", "tensordict", "torchx")
"""Modules that are missing if only planning and reports are installed."""

CPU_BUILD = "+cpu"
"""Suffix of the version of a package without CUDA code."""

STAND_IN = "0+cpu"
"""Version of the empty package `requirements/fbgemm-gpu-shim`."""


SETS = {"2.14.1": ("1.9.0", "1.9.2"), "2.13.0": ("1.8.0", "1.8.0"), "2.11.0": ("1.6.0", "1.6.1")}
"""Versions of FBGEMM and TorchRec that were tested with a version of torch."""

DEFAULTS: dict[Build, str] = {"cuda": "2.14.1", "cpu": "2.13.0"}
"""Default versions of torch. On CPUs, the row-wise Adagrad of FBGEMM 1.9 takes 1.4 times as long as
that of 1.8."""


def installed_versions() -> dict[str, str]:
    """Return the versions of those `PACKAGES` that are installed and readable."""
    found = readable_versions(PACKAGES)
    return {package: text for package, text in found.items() if text != STAND_IN}


def version_problem(installed: Mapping[str, str]) -> str | None:
    """Return a line that says that packages do not fit together, and which command fixes that.

    It is None if they fit together, if torch is missing, and if no version is known.
    """
    torches = {_torch_of(package, text) for package, text in installed.items()}
    for_cuda = installed.get(FBGEMM["cuda"], CPU_BUILD)
    has_both = {*FBGEMM.values()} <= {*installed}
    is_mixed = _is_for_cpu(installed) and not for_cuda.endswith(CPU_BUILD)
    if not has_both and not is_mixed and ("torch" not in installed or len(torches) == 1):
        return None
    listed = ", ".join(f"{package} {text}" for package, text in installed.items())
    return (
        f"{listed} do not belong together: each FBGEMM is built for one torch (known are "
        f"{', '.join(map(minor, SETS))}), for CUDA or the CPU as this is, and one build can be "
        f"installed; run: {install_command(installed)}"
    )


def install_command(installed: Mapping[str, str], build: Build | None = None) -> str:
    """Return the command that installs what training needs, and replaces any installed FBGEMM.

    Args:
        installed: versions by package.
        build: the build to install; None for the one that fits the packages and this machine.
    """
    build = build or build_of(installed)
    command = f'pip install "dlrm_sharded[{build}]"'
    if build == "cpu":  # TorchRec requires FBGEMM's build for CUDA, which would replace this one
        command += f" && pip install --no-deps torchrec=={SETS[DEFAULTS[build]][1]}"
    removed = " ".join(package for package in FBGEMM.values() if package in installed)
    return f"pip uninstall -y {removed} && {command}" if removed else command


def missing_text(error: BaseException | None) -> str | None:
    """Return the message for an error about a missing package of training; None for others."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in TRAINING_MODULES:
            command = install_command(installed_versions())
            return f"this needs {error.name}, which is not installed; run: {command}"
        error = error.__cause__ or error.__context__
    return None


def build_of(installed: Mapping[str, str]) -> Build:
    """Return the build of FBGEMM that fits this machine and the installed packages."""
    demanded = os.environ.get(DEVICE_VARIABLE)
    if demanded == "cpu" or _is_for_cpu(installed):
        return "cpu"
    wants_cuda = demanded == "cuda" or FBGEMM["cuda"] in installed or visible_gpus()
    return "cuda" if wants_cuda else "cpu"


def _is_for_cpu(installed: Mapping[str, str]) -> bool:
    return installed.get("torch", "").endswith(CPU_BUILD)


def minor(text: str) -> str:
    """Return 2.14 for the version 2.14.1+cu130."""
    return ".".join(text.split(".")[:2])


def _torch_of(package: str, text: str) -> str | None:
    """Return the torch in `SETS` to which a version belongs, whatever its patch level and build."""
    for torch, (fbgemm, torchrec) in SETS.items():
        known = {"torch": torch, "torchrec": torchrec}.get(package, fbgemm)
        if minor(known) == minor(text):
            return torch
    return None
