"""The probe: how fast the hardware of a rank is, in figures that take a second to measure."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from dlrm_sharded.files.limited import PositiveFloat, PositiveInt

FIGURES = {
    "copy_gb_per_s": "memory bandwidth",
    "gather_gb_per_s": "random gather",
    "cached_gather_gb_per_s": "gather in cache",
}
"""Figures of the probe of a device, and what messages call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeProbe:
    """Speed of an all-to-all between all ranks of a job.

    Args:
        num_ranks, ranks_per_host: the job's.
        latency_us: time of an all-to-all of a few bytes.
        gb_per_s: bytes that a rank sends to the others, over the time of a large all-to-all.
    """

    num_ranks: PositiveInt
    ranks_per_host: PositiveInt
    latency_us: PositiveFloat
    gb_per_s: PositiveFloat

    @property
    def ranks(self) -> tuple[int, int]:
        """Ranks of the job and of a host; only probes with equal numbers are compared."""
        return self.num_ranks, self.ranks_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Speed of the device of one rank, with the threads of a rank.

    Args:
        copy_gb_per_s: bytes read and written by a copy that no cache holds.
        gather_gb_per_s: bytes of rows that pooled lookups read at random, beyond all caches.
        cached_gather_gb_per_s: the same from rows that the second-level cache holds.
        load: other work on the host: processes that ran or waited in the minute before, on average.
        exchange: None without a measurement between ranks.
    """

    copy_gb_per_s: PositiveFloat
    gather_gb_per_s: PositiveFloat
    cached_gather_gb_per_s: PositiveFloat
    load: PositiveFloat
    exchange: ExchangeProbe | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON, with figures of 4 digits."""
        text = json.dumps(dataclasses.asdict(self))
        fields: dict[str, Any] = json.loads(text, parse_float=lambda f: float(f"{float(f):.4g}"))
        return fields
