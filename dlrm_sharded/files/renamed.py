"""Targets in configs of release 0.2 that have been renamed, and keys that were removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: dict[str, str] = {
    "dlrm_sharded.fitting.picture.cost_picture": (
        "dlrm_sharded.calibration.hardware_costs.hardware_cost_model"
    ),
    "dlrm_sharded.cost.neuroshard_paper.paper_cost_model": (
        "dlrm_sharded.cost.published_nets.neuroshard_cost_model"
    ),
    "dlrm_sharded.sharders.baselines.neuroshard_paper.NeuroShardPaperSharder": (
        "dlrm_sharded.sharders.neuroshard.published_sharder"
    ),
    "dlrm_sharded.sharders.baselines.torchrec.TorchRecSharder": (
        "dlrm_sharded.sharders.torchrec.TorchRecSharder"
    ),
    "dlrm_sharded.sharders.neuroshard.neuroshard_sharder": (
        "dlrm_sharded.sharders.search.search_sharder"
    ),
    "dlrm_sharded.ranks.distributed.detect_topology": (
        "dlrm_sharded.plans.topology_settings.TopologySettings"
    ),
}
"""Present names by names in 0.2, none of which is a target in today's configs."""


GONE = ("cache_tables", "informed", "objective", "portfolio")
"""Keys that the package's targets had in 0.2, and none has now."""


def with_present_target(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config node with the present name of its target, and without removed keys."""
    target = str(node.get("_target_"))
    if not target.startswith("dlrm_sharded."):
        return dict(node)
    kept = {key: value for key, value in node.items() if key not in GONE}
    return {**kept, "_target_": RENAMED.get(target, target)}
