"""Print in one line on what this installation computes, or what to change: `dlrm-check-install`."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.commands.words import read_words
from dlrm_sharded.files.errors import EXIT_USER_ERROR, ConfigError
from dlrm_sharded.files.provenance import device_name, versions
from dlrm_sharded.ranks.devices import device_type
from dlrm_sharded.ranks.gpus import driver_version
from dlrm_sharded.ranks.version_sets import (
    FBGEMM,
    Build,
    install_command,
    installed_versions,
    version_problem,
)

if TYPE_CHECKING:
    import torch


def main() -> None:
    with exit_codes():
        read_words(__doc__)
        if version_problem(installed_versions()) is not None:
            sys.exit(EXIT_USER_ERROR)  # importing the package has printed it
        print(installation())


def installation() -> str:
    """Return a text with the device, its driver, and the versions of the packages.

    Raises:
        ConfigError: torch cannot use the visible GPUs, or FBGEMM does not run on the device.
    """
    installed = installed_versions()
    packages = ", ".join(f"{package} {version}" for package, version in versions().items())
    missing = [package for package in ("torch", "torchrec") if package not in installed]
    if missing or not {*FBGEMM.values()} & {*installed}:
        return (
            f"plans task files and compares runs; {packages}; to train and measure "
            f"as well, run: {install_command(installed)}"
        )
    import torch

    device = torch.device(device_type())
    _check_fbgemm(device, packages)
    if device.type == "cpu":
        return f"computes on the CPU ({device_name(device).removeprefix('cpu: ')}); {packages}"
    gpus = Counter(device_name(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))
    return (
        f"computes on {', '.join(f'{count} x {name}' for name, count in gpus.items())}, driver "
        f"{driver_version() or 'unknown'}, CUDA {torch.version.cuda}; {packages}"
    )


def _check_fbgemm(device: torch.device, packages: str) -> None:
    """Run one of FBGEMM's kernels, which fails if its build does not fit torch or the device."""
    import torch

    build: Build = "cuda" if device.type == "cuda" else "cpu"
    try:
        import fbgemm_gpu  # noqa: F401, registers the kernels

        kernel = torch.ops.fbgemm.asynchronous_complete_cumsum
        kernel(torch.ones(1, dtype=torch.int32, device=device)).tolist()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"FBGEMM does not run on {device.type} ({error.__cause__ or error}) among {packages}; "
            f"run: {install_command(installed_versions(), build)}"
        ) from error


if __name__ == "__main__":
    main()
