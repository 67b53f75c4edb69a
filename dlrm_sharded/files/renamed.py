"""Targets in configs of release 0.2 that have other names now, and keys that are gone."""

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
"""Present names by those of 0.2; none of these is a target of today's configs."""


GONE = ("cache_tables", "informed", "objective", "portfolio")
"""Keys of the package's own targets in 0.2 that none of them has now."""


def with_present_target(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node of a config with the name that its target has now, without keys of 0.2."""
    target = str(node.get("_target_"))
    if not target.startswith("dlrm_sharded."):
        return dict(node)
    kept = {key: value for key, value in node.items() if key not in GONE}
    return {**kept, "_target_": RENAMED.get(target, target)}
