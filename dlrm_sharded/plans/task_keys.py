"""The keys of task.json: where users set them, their limits, and checks of what they say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dlrm_sharded.files.errors import ConfigError, check_count, check_number

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
    found: set[str] = set()

    def without(form: object) -> object:
        if isinstance(form, list):
            return [without(item) for item in form]
        if not isinstance(form, Mapping):
            return form
        found.update(CACHE_KEYS & form.keys())
        return {key: value for key, value in form.items() if key not in CACHE_KEYS}

    forms = {key: without(fields[key]) for key in ("tables", "topology") if key in fields}
    if not found:
        return fields
    log.warning(
        "%s has %s, for tables in host memory, which are not there since 0.3; ignored",
        name,
        ", ".join(sorted(found)),
    )
    return {**fields, **forms}


def check_bandwidth(key: str, value: object) -> None:
    """Raise ConfigError unless a key of `BANDWIDTHS` has a bandwidth that a link may have."""
    try:
        check_number(f"topology.{key}", value, least=MIN_BANDWIDTH, most=MAX_BANDWIDTH)
    except ConfigError as error:
        of_run = key.replace("_bytes_", "_gb_")
        raise ConfigError(f"{error}; in a run, set topology.{of_run}, in GB/s") from error


def check_memory_by_rank(by_rank: object, world_size: int) -> None:
    """Raise ConfigError unless `memory_bytes_by_rank` has a figure for each rank, or is None."""
    key = "topology.memory_bytes_by_rank"
    if by_rank is None:
        return
    if not isinstance(by_rank, tuple):
        raise ConfigError(
            f"{key} is a {type(by_rank).__name__}, must be a list in task.json, a tuple in code"
        )
    if len(by_rank) != world_size:
        raise ConfigError(
            f"{key} has {len(by_rank):,} figures, must have one for each of the "
            f"{world_size:,} ranks of topology.world_size"
        )
    for rank, memory_bytes in enumerate(by_rank):
        check_count(f"{key}[{rank}]", memory_bytes, least=1, most=MAX_BYTES)


def check_optimizer_bytes(by_table: dict[str, tuple[int, int]]) -> None:
    """Raise ConfigError unless `optimizer_bytes_by_table` has sizes that a state may have."""
    for name, state in by_table.items():
        for num_bytes in state:
            key = f"topology.optimizer_bytes_by_table[{name!r}]"
            check_count(key, num_bytes, least=0, most=2**20)
