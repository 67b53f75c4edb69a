"""Times of collectives among the GPUs of one host: tables, and curves for GPUs without a table.

A GPU that nobody measured takes the curves of measured ones; with NVLink, only curves of GPUs with
NVLink. Such a curve gives the time by the bytes over the nominal bandwidth of the links, so that
latencies stay and the other times scale. Of several measured GPUs, the geometric mean counts, with
weights that fall with the distance of the bandwidths: see `DISTANCE_WEIGHT`. With PCIe, the host
decides more than the GPU does: see `HostCollectives`.

Letters: P sizes of a curve.
"""

from __future__ import annotations

import csv
import functools
import math
from collections import defaultdict
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from dlrm_sharded.hardware.gpus.gpu_specs import GpuSpec, gpu_specs

COLLECTIVES = ("alltoall", "reduce_scatter", "all_gather")

DISTANCE_WEIGHT = 2.0
"""A measured GPU weighs exp(-DISTANCE_WEIGHT) times as much per factor of 2 between bandwidths.

Of 0.5, 1, 2, 3, 4 and 8, this has the smallest mean errors for left-out GPUs that stay within
15 % from 8 MiB up and within 30 % below for every GPU with NVLink.
"""

Floats = NDArray[np.float64]
Tables = dict[tuple[str, str, int], "Curve"]


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Time of one collective among a number of GPUs, by size.

    Args:
        sent_bytes: [P], bytes that a rank sends to all other ranks together, ascending.
        ms: [P], times of these sizes.
    """

    sent_bytes: Floats
    ms: Floats

    def time_ms(self, sent_bytes: float) -> float:
        """Interpolate times on log scales; they are constant below all sizes and linear above."""
        if sent_bytes <= self.sent_bytes[-1]:
            logs = np.log(max(sent_bytes, 1.0)), np.log(self.sent_bytes), np.log(self.ms)
            return math.exp(float(np.interp(*logs)))
        slope = (self.ms[-1] - self.ms[-2]) / (self.sent_bytes[-1] - self.sent_bytes[-2])
        return float(self.ms[-1] + slope * (sent_bytes - self.sent_bytes[-1]))


@functools.cache
def measured_curves() -> Tables:
    """Return the curves of nccl_collectives.csv by system, collective and number of GPUs."""
    points: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    text = files(__package__).joinpath("nccl_collectives.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        if row["collective"] not in COLLECTIVES:
            continue
        num_gpus = int(row["num_gpus"])
        # a rank keeps the part of its message that is its own
        sent_bytes = int(row["bytes"]) * (num_gpus - 1) / num_gpus
        points[row["system"], row["collective"], num_gpus].append((sent_bytes, float(row["ms"])))
    return {key: Curve(*np.array(sorted(values)).T) for key, values in points.items()}


@dataclass(frozen=True, slots=True)
class HostCollectives:
    """Times of collectives among GPUs of one kind in one host.

    On PCIe, some hosts pass everything through their memory: the GPUs of the only one that was
    measured, L40S, exchange at a twentieth of their nominal bandwidth. In others, GPUs reach each
    other, as with NVLink. Only a calibration shows which of the two a host is, so the time is the
    geometric mean of both. MLPerf's steps on 8 L40S and 8 H100 PCIe are predicted 8 to 12 % too
    long.
    """

    spec: GpuSpec

    def time_ms(
        self,
        collective: str,
        num_gpus: int,
        sent_bytes: float,
        *,
        link_gb_per_s: float | None = None,
    ) -> float:
        """Return the time of one of `COLLECTIVES`; 0 for one GPU.

        Times are interpolated between numbers of GPUs. Beyond the largest measured number, latency
        grows with the logarithm of the number as it does up to there.

        Args:
            sent_bytes: bytes that a rank sends to all others together.
            link_gb_per_s: bandwidth of a GPU's links, one way; None for the nominal one.
        """
        if num_gpus < 2:
            return 0.0
        if link_gb_per_s is not None:
            sent_bytes *= self.spec.link_gb_per_s / link_gb_per_s
        times = {n: self._measured_ms(collective, n, sent_bytes) for n in self._sizes(collective)}
        logs = [math.log2(n) for n in times]
        if num_gpus <= max(times):
            between = np.interp(math.log2(num_gpus), logs, np.log(list(times.values())))
            return math.exp(float(between))
        latencies = [self._measured_ms(collective, n, 0.0) for n in sorted(times)[-2:]]
        growth = max(latencies[1] - latencies[0], 0.0) / (logs[-1] - logs[-2])
        return times[max(times)] + growth * (math.log2(num_gpus) - logs[-1])

    def _sizes(self, collective: str) -> list[int]:
        """Return the numbers of GPUs that were measured, for this GPU or for similar ones."""
        systems = {spec.collectives for donors in self._donors() for spec in donors}
        return sorted({n for s, c, n in measured_curves() if s in systems and c == collective})

    def _measured_ms(self, collective: str, num_gpus: int, sent_bytes: float) -> float:
        """Return the time for a number of GPUs that was measured.

        It is the mean over the classes of `_donors` of the mean times of their GPUs, scaled to the
        links of this one.
        """
        tables = measured_curves()
        own = (self.spec.collectives or "", collective, num_gpus)
        if own in tables and self.spec.link == "nvlink":
            return tables[own].time_ms(sent_bytes)
        class_means = []
        for donors in self._donors():
            times = []
            for donor in donors:
                if curve := tables.get((donor.collectives or "", collective, num_gpus)):
                    ratio = donor.link_gb_per_s / self.spec.link_gb_per_s
                    weight = math.exp(-DISTANCE_WEIGHT * abs(math.log2(ratio)))
                    times.append((curve.time_ms(sent_bytes * ratio), weight))
            if times:
                class_means.append((_geometric_mean(times), 1.0))
        return _geometric_mean(class_means)

    def _donors(self) -> list[list[GpuSpec]]:
        """Return one GPU of each measured system, by the class of its links.

        A GPU with NVLink has only those of its class.
        """
        by_class: dict[str, dict[str, GpuSpec]] = {"nvlink": {}, "pcie": {}}
        for spec in gpu_specs().values():
            if spec.collectives:
                by_class[spec.link][spec.collectives] = spec
        found = [list(donors.values()) for donors in by_class.values()]
        return found[:1] if self.spec.link == "nvlink" else found


def _geometric_mean(weighted: list[tuple[float, float]]) -> float:
    total = sum(weight for _, weight in weighted)
    return math.exp(sum(weight * math.log(value) for value, weight in weighted) / total)
