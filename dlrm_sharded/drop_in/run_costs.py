"""The costs of the hardware of a model's ranks, found as a run finds them."""

from __future__ import annotations

import os

from dlrm_sharded.calibration.hardware_costs import AUTO
from dlrm_sharded.hardware.artifact import CALIBRATED
from dlrm_sharded.hardware.context import RunContext
from dlrm_sharded.hardware.detect import local_context
from dlrm_sharded.plans.task import Topology
from dlrm_sharded.ranks.distributed import rank_from_environment


def journal_of_user() -> str:
    """Return where the store of samples is, as the default of `train.yaml` says."""
    return os.environ.get("DLRM_SHARDED_JOURNAL", AUTO)


def context_of_topology(topology: Topology, optimizer: str | None) -> RunContext:
    """Return what the ranks of a topology compute on; devices of another type are unknown."""
    rank = rank_from_environment()
    if topology.compute_device != rank.device.type:
        return RunContext(
            topology.compute_device, None, optimizer, topology.ranks_per_host, calibrated=CALIBRATED
        )
    return local_context(rank.device, optimizer, topology.ranks_per_host)
