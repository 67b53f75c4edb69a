"""The run for which a cost model, a policy or a sharder is chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunContext:
    """Hardware and optimizer of a run.

    Args:
        device: "cpu" or "cuda".
        hardware: name of the hardware from `provenance.device_name`; None if any will do, as for
            a plan that is made on another machine.
        optimizer: fused optimizer of the tables; None if any will do.
    """

    device: str = "cpu"
    hardware: str | None = None
    optimizer: str | None = None
