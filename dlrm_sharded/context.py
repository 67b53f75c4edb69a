"""The run for which a cost model, a policy or a sharder is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.task import CAN_REPLICATE


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
    """

    device: str = "cpu"
    hardware: Hardware | None = None
    optimizer: str | None = None
    ranks_per_host: int | None = None
    fbgemm: str | None = None

    @property
    def can_replicate(self) -> bool:
        """Return whether tables can be replicated under the optimizer; yes if none is known."""
        return self.optimizer is None or self.optimizer in CAN_REPLICATE
