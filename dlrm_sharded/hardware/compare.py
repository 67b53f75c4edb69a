"""Says whether two pieces of hardware are the same, as far as costs depend on it, or why not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.hardware.probe import Probe

FIGURES = {
    "copy_gb_per_s": "memory bandwidth",
    "gather_gb_per_s": "random gather",
    "cached_gather_gb_per_s": "gather in cache",
    "gemm_gflops": "matrix product",
}
"""Figures of the probe of a device, and what messages call them."""

EXCHANGE = "all-to-all bandwidth"
LATENCY = "all-to-all latency"

BOUND = 1.6
"""Factor by which a figure of a device may differ on the same hardware.

On 2 cores of an AMD EPYC, 48 probes beside 0 to 2 streaming or busy processes, and 2 to 3 other
processes, were at most this far from the best in all but one figure of one probe: 1.29 (matrix
product), 1.35 and 1.46 (gathers), 1.58 (copy; once 2.1). A machine of half the speed is beyond it.
"""

EXCHANGE_BOUNDS = {EXCHANGE: 1.9, LATENCY: 2.5}
"""Likewise for exchanges, in which all ranks must have a core at the same time.

Ten exchanges of 4 ranks there, beside a load of 5 to 6, differed by 1.7 and 2.3 at most.
"""

GATHERS = ("gather_gb_per_s", "cached_gather_gb_per_s")

AVX512 = "avx512f"
"""The first of the AVX-512 sets, without which there is none of the others."""

NAMES = {
    "architecture": "architecture",
    "vendor": "vendor of the CPU",
    "family": "family of the CPU",
    "model": "model of the CPU",
    "torch_capability": "instruction set that torch uses",
    "l1_kib": "KiB of first-level cache",
    "l2_kib": "KiB of second-level cache",
    "l3_kib": "KiB of third-level cache",
    "cores": "cores",
    "threads": "threads of a rank",
    "name": "GPU",
    "capability": "compute capability",
    "memory_gib": "GiB of memory",
    "memory_gb_per_s": "GB/s of memory bandwidth",
    "nvlinks": "NVLinks",
    "pcie": "PCIe",
}
"""Names in messages for the fields of a fingerprint that they show on both sides."""


@dataclass(frozen=True, slots=True)
class Match:
    """The outcome of a comparison of a run's hardware with that of an artefact.

    Args:
        is_same: whether fingerprints and probes agree.
        reasons: sentences that say what differs ("here" is the run); empty if nothing does.
        has_same_fingerprint: whether only the probes differ, or one is missing.
        speeds: figures of the run's probe over those of the artefact's, by name; empty without
            two probes of one type of device.
    """

    is_same: bool
    reasons: tuple[str, ...] = ()
    has_same_fingerprint: bool = False
    speeds: Mapping[str, float] = field(default_factory=dict)

    @property
    def distance(self) -> float:
        """Largest factor between two figures of the probes, infinite if it is not known."""
        return max((max(speed, 1 / speed) for speed in self.speeds.values()), default=math.inf)

    @property
    def compute_factor(self) -> float:
        """Time of lookups here over that of the artefact's hardware; 1 if it is not known.

        Lookups read rows partly from memory and partly from caches, hence the geometric mean.
        """
        gathers = [self.speeds.get(FIGURES[key], 1.0) for key in GATHERS]
        return 1 / math.prod(gathers) ** (1 / len(gathers))

    @property
    def exchange_factor(self) -> float:
        """Likewise for exchanges; between other ranks, those in memory count."""
        return 1 / self.speeds.get(EXCHANGE, self.speeds.get(FIGURES["copy_gb_per_s"], 1.0))


def compare(ours: Hardware, theirs: Hardware) -> Match:
    """Compare the hardware of a run with that of an artefact.

    What one side does not know does not count. A side without a fingerprint or without a probe is
    never the same.
    """
    if ours.fingerprint is None or theirs.fingerprint is None:
        side = "here" if ours.fingerprint is None else "there"
        others = [f"{ours.name} here, {theirs.name} there"] if ours.name != theirs.name else []
        return Match(False, (*others, f"the hardware {side} has no fingerprint"))
    if ours.fingerprint.device != theirs.fingerprint.device:
        return Match(False, (f"{ours.name} here, {theirs.name} there",))
    differing = tuple(_differences(ours.fingerprint, theirs.fingerprint))
    if ours.probe is None or theirs.probe is None:
        side = "here" if ours.probe is None else "there"
        return Match(False, (*differing, f"the speed {side} was not probed"), not differing)
    speeds = _speeds(ours.probe, theirs.probe)
    slower_or_faster = tuple(
        f"{name} {speed:.2g} of there"
        for name, speed in speeds.items()
        if max(speed, 1 / speed) > EXCHANGE_BOUNDS.get(name, BOUND)
    )
    if slower_or_faster and ours.probe.load > ours.fingerprint.cpu.cores:
        slower_or_faster += (f"the probe here ran beside a load of {ours.probe.load:.2g}",)
    reasons = differing + slower_or_faster
    return Match(not reasons, reasons, not differing, speeds)


def _speeds(ours: Probe, theirs: Probe) -> dict[str, float]:
    speeds = {name: getattr(ours, key) / getattr(theirs, key) for key, name in FIGURES.items()}
    here, there = ours.exchange, theirs.exchange
    if (
        here is not None
        and there is not None
        and here.num_ranks == there.num_ranks
        and here.ranks_per_host == there.ranks_per_host
    ):
        speeds[EXCHANGE] = here.gb_per_s / there.gb_per_s
        speeds[LATENCY] = there.latency_us / here.latency_us
    return speeds


def _differences(ours: Fingerprint, theirs: Fingerprint) -> Iterator[str]:
    """Yield a sentence for each field that is known on both sides and differs."""
    here, there = ours.computing, theirs.computing
    for key in here:
        if here[key] == there[key] or None in (here[key], there[key]):
            continue
        if key == "instruction_sets":
            yield from _sets(set(here[key]), set(there[key]))
        elif key == "switches":
            for switch in sorted({*here[key]} ^ {*there[key]}):
                yield f"{switch} is set {'here' if switch in here[key] else 'there'} only"
        else:
            yield f"{NAMES[key]}: {here[key]} here, {there[key]} there"


def _sets(here: set[str], there: set[str]) -> Iterator[str]:
    for lacking, side in ((there - here, "here"), (here - there, "there")):
        names = sorted(lacking)
        if AVX512 in lacking:
            names = ["AVX-512", *(name for name in names if not name.startswith("avx512"))]
        if names:
            yield f"no {', '.join(names)} {side}"
