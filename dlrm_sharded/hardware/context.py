"""The run for which a cost model, a policy or a sharder is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dlrm_sharded.hardware.hardware import Hardware


@dataclass(frozen=True, slots=True)
class RunContext:
    """Hardware and optimizer of a run.

    Args:
        device: "cpu" or "cuda".
        hardware: what the ranks compute on, from `hardware.detect`; None if it is not known, as
            for a plan that is made on another machine.
        optimizer: fused optimizer of the tables; None if any will do.
        ranks_per_host: ranks that share a host's cores and links; None if it is not known.
        fbgemm: version of FBGEMM that looks up rows; None if it is not known.
        calibrated: folder with artifacts that were made here, such as `calibration`, in which
            commands look; None for the package alone.
        samples_dir: folder with what this job has measured, if that is not in the user's cache.
    """

    device: str = "cpu"
    hardware: Hardware | None = None
    optimizer: str | None = None
    ranks_per_host: int | None = None
    fbgemm: str | None = None
    calibrated: Path | None = None
    samples_dir: Path | None = None
