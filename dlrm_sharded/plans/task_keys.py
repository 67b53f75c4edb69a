"""The keys of task.json: where users set them, their limits, and those that are gone."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

MEMORY_KEYS = "topology.memory_gib, or memory_bytes in task.json"
"""Where users set the memory of a rank, for messages."""

OPTIMIZER_KEYS = ("bytes_per_element", "optimizer_bytes_per_row")
"""Keys of a topology that an optimizer of tables decides, in the order of `memory_of`."""

MAX_RANKS, MAX_BYTES = 2**20, 2**60
"""Limits beyond any real job, below which sums of sizes are exact in 64 bits."""

MIN_BANDWIDTH, MAX_BANDWIDTH = 1.0, 1e18
"""Limits beyond any real link, in bytes/s, between which predicted times are finite."""

BANDWIDTHS = ("intra_host_bytes_per_s", "inter_host_bytes_per_s")
"""Keys of a topology that are bandwidths; all are optional."""

MAX_BATCH_SIZE = 2**40

CACHE_KEYS = {"miss_ratio_curve", "host_memory_bytes", "host_bytes_per_s"}
"""Keys of tables and topologies with which release 0.2 planned tables in host memory."""

log = logging.getLogger(__name__)


def without_cache_keys(fields: Mapping[str, Any], *, name: str) -> Mapping[str, Any]:
    """Return a task.json without the keys of tables in host memory, and warn if it has any.

    Args:
        name: what to call the task in the warning.
    """
    tables, topology = fields.get("tables"), fields.get("topology")
    forms = [*(tables if isinstance(tables, list) else ()), topology]
    found = {key for form in forms if isinstance(form, Mapping) for key in CACHE_KEYS & form.keys()}
    if not found:
        return fields
    log.warning(
        "%s has %s, for tables in host memory, which are not there since 0.3; ignored",
        name,
        ", ".join(sorted(found)),
    )
    kept = [
        {key: value for key, value in form.items() if key not in CACHE_KEYS}
        if isinstance(form, Mapping)
        else form
        for form in forms
    ]
    return {**fields, "tables": kept[:-1], "topology": kept[-1]}
