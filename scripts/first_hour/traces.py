"""Reads from a trace of torch.profiler how a GPU and its host spend training steps."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what occupies the GPU."""

NUM_TOP = 20
"""Number of the longest kernels that are listed."""

Event = Mapping[str, Any]
"""An event of a trace: its category `cat`, `name`, start `ts` and duration `dur` in µs."""


def read_events(path: Path) -> list[Event]:
    """Return the events with a duration of a compressed trace."""
    with gzip.open(path, "rt") as file:
        events: list[Event] = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def summary(events: Sequence[Event], num_steps: int) -> dict[str, Any]:
    """Return the share of time that the GPU was busy, and times of a step by part, in ms."""
    on_gpu = [event for event in events if event.get("cat") in ON_GPU]
    launches = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    return {
        "gpu_busy_share": busy_share(on_gpu) if on_gpu else None,
        "kernels_per_step": len(on_gpu) / num_steps,
        "host_ms_by_part": host_parts(events, num_steps),
        "cuda_calls_ms": _largest(launches, num_steps),
        "kernels_ms": _largest(on_gpu, num_steps),
    }


def busy_share(on_gpu: Iterable[Event]) -> float:
    """Return the share of the time from the first to the last event in which any is running."""
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in on_gpu)
    busy, covered_until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return round(busy / (covered_until - spans[0][0]), 4)


def host_parts(events: Iterable[Event], num_steps: int) -> dict[str, float]:
    """Return the host's time of a step in each part that TorchRec's pipelines name.

    Their names are such as "## forward 12 ##", with the number of the batch.
    """
    parts: defaultdict[str, float] = defaultdict(float)
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "user_annotation" and name.startswith("##"):
            parts[re.sub(r"[#\d]", "", name).strip()] += float(event["dur"]) / 1e3
    return _by_time(parts, num_steps)


def _largest(events: Iterable[Event], num_steps: int) -> dict[str, float]:
    times: defaultdict[str, float] = defaultdict(float)
    for event in events:
        times[str(event["name"])[:120]] += float(event["dur"]) / 1e3
    return dict(list(_by_time(times, num_steps).items())[:NUM_TOP])


def _by_time(times_ms: Mapping[str, float], num_steps: int) -> dict[str, float]:
    """Return the times of one step, the longest first."""
    ordered = sorted(times_ms.items(), key=lambda entry: entry[1], reverse=True)
    return {name: round(ms / num_steps, 4) for name, ms in ordered}
