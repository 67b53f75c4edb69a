"""Say in one line what this installation computes on, or what to change: `dlrm-check-install`."""

from __future__ import annotations

from collections import Counter

import torch

from dlrm_sharded.commands.exit_codes import exit_codes
from dlrm_sharded.devices import device_type
from dlrm_sharded.errors import ConfigError
from dlrm_sharded.gpus import driver_version
from dlrm_sharded.provenance import device_name, versions


def main() -> None:
    with exit_codes():
        print(installation())


def installation() -> str:
    """Return the device, its driver, and the versions of the packages.

    Raises:
        ConfigError: torch cannot use the visible GPUs, or FBGEMM does not run on the device.
    """
    device = torch.device(device_type())
    packages = ", ".join(f"{package} {version}" for package, version in versions().items())
    _check_fbgemm(device, packages)
    if device.type == "cpu":
        return f"computes on the CPU ({device_name(device).removeprefix('cpu: ')}); {packages}"
    gpus = Counter(device_name(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))
    return (
        f"computes on {', '.join(f'{count} x {name}' for name, count in gpus.items())}, driver "
        f"{driver_version() or 'unknown'}, CUDA {torch.version.cuda}; {packages}"
    )


def _check_fbgemm(device: torch.device, packages: str) -> None:
    """Run one of FBGEMM's kernels, which fails where its build does not fit torch or the device."""
    try:
        import fbgemm_gpu  # noqa: F401, registers the kernels

        kernel = torch.ops.fbgemm.asynchronous_complete_cumsum
        kernel(torch.ones(1, dtype=torch.int32, device=device)).tolist()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"FBGEMM does not run on {device.type} ({error.__cause__ or error}) among {packages}; "
            f"install the packages of requirements/{device.type}.txt together"
        ) from error


if __name__ == "__main__":
    main()
