"""A synthetic nvidia-smi, for tests of what is done on machines with GPUs."""

import os
from collections.abc import Mapping
from pathlib import Path

UUIDS = [f"GPU-{digit * 8}-aaaa-bbbb-cccc-dddddddddddd" for digit in "01234567"]
PARTS = [f"MIG-{digit * 8}-aaaa-bbbb-cccc-dddddddddddd" for digit in "01234567"]

MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


def install_nvidia_smi(
    folder: Path,
    num_gpus: int,
    *,
    driver: str = "580.65.06",
    answers: Mapping[str, str] | None = None,
) -> str:
    """Write an nvidia-smi to the folder, and return a PATH with it and the system's programs.

    Args:
        num_gpus: number of GPUs that it lists; 0 for an nvidia-smi that fails.
        answers: what it prints for a first option; others print the driver.
    """
    listed = [f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[i]})" for i in range(num_gpus)]
    texts = {"-L": "\n".join(listed), **(answers or {})}
    cases = [line for option, text in texts.items() for line in (f"{option})", *_printed(text))]
    script = ["case $1 in", *cases, f"*) echo {driver};;", "esac"]
    if num_gpus == 0:
        script = [f"echo '{MISMATCH}'; exit 18"]
    path = folder / "nvidia-smi"
    path.write_text("\n".join(["#!/bin/sh", *script, ""]))
    path.chmod(0o755)
    return os.pathsep.join([str(folder), os.defpath])


def _printed(text: str) -> list[str]:
    return ["cat <<'END'", text, "END", ";;"]
