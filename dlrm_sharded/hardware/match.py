"""Says whether two pieces of hardware are the same, as far as costs depend on it, or why not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dlrm_sharded.hardware.fingerprint import Fingerprint
from dlrm_sharded.hardware.hardware import Hardware
from dlrm_sharded.hardware.probe import FIGURES, Probe

EXCHANGE = "all-to-all bandwidth"
LATENCY = "all-to-all latency"

BOUND = 1.6
"""Factor by which a figure of a device may differ on the same hardware.

On 2 cores of an AMD EPYC, 48 probes under 0 to 2 streaming or busy processes, and 2 to 3 other
processes, were at most this far from the best in all but one figure of one probe: 1.35 and 1.46
(gathers), 1.58 (copy; once 2.1). A machine of half the speed is beyond it.
"""

EXCHANGE_BOUNDS = {EXCHANGE: 1.9, LATENCY: 2.5}
"""The same for exchanges, in which all ranks must have a core at the same time.

Ten exchanges of 4 ranks there, under a load of 5 to 6, differed by 1.7 and 2.3 at most.
"""

UNNAMED = "the hardware is not named; hardware=here names this machine"
"""Says why costs for unknown ranks are a prior."""

GATHERS = ("gather_gb_per_s", "cached_gather_gb_per_s")


@dataclass(frozen=True, slots=True)
class Match:
    """The outcome of a comparison of a run's hardware with an artifact's.

    Args:
        reasons: sentences that say what differs ("here" is the run); empty if nothing does.
        has_same_fingerprint: whether only the probes differ, or one is missing.
        speeds: ratios of the run's probe to the artifact's, by name of the figure; empty without
            two probes of one type of device.
    """

    reasons: tuple[str, ...]
    has_same_fingerprint: bool = False
    speeds: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_same(self) -> bool:
        """Tells whether fingerprints and probes are known and agree."""
        return not self.reasons

    @property
    def distance(self) -> float:
        """Largest factor between two figures of the probes, infinite if it is not known."""
        return max((max(speed, 1 / speed) for speed in self.speeds.values()), default=math.inf)

    @property
    def compute_factor(self) -> float:
        """Time of lookups here over their time on the artifact's hardware; 1 if it is not known.

        Lookups read rows partly from memory and partly from caches, hence the geometric mean.
        """
        gathers = [self.speeds.get(FIGURES[key], 1.0) for key in GATHERS]
        return 1 / math.prod(gathers) ** (1 / len(gathers))

    @property
    def exchange_factor(self) -> float:
        """The same for exchanges; by the memory bandwidth if these were not probed alike."""
        return 1 / self.speeds.get(EXCHANGE, self.speeds.get(FIGURES["copy_gb_per_s"], 1.0))


def compare(ours: Hardware | None, theirs: Hardware) -> Match:
    """Compare the hardware of a run, if it is known, with an artifact's.

    Fields that one side does not know are ignored. Hardware without a fingerprint or without a
    probe is never the same.
    """
    if ours is None:
        return Match((UNNAMED,))
    if ours.fingerprint is None or theirs.fingerprint is None:
        side = "here" if ours.fingerprint is None else "there"
        others = [f"{ours.name} here, {theirs.name} there"] if ours.name != theirs.name else []
        return Match((*others, f"the hardware {side} has no fingerprint"))
    if ours.fingerprint.device != theirs.fingerprint.device:
        return Match((f"{ours.name} here, {theirs.name} there",))
    differing = tuple(_differences(ours.fingerprint, theirs.fingerprint))
    if ours.probe is None or theirs.probe is None:
        side = "here" if ours.probe is None else "there"
        reasons = *differing, f"the speed {side} was not probed"
        return Match(reasons, has_same_fingerprint=not differing)
    speeds = _speeds(ours.probe, theirs.probe)
    slower_or_faster = tuple(
        f"{name}: {speed:.2g} x the speed of the artifact's machine"
        for name, speed in speeds.items()
        if max(speed, 1 / speed) > EXCHANGE_BOUNDS.get(name, BOUND)
    )
    if slower_or_faster and ours.probe.load > ours.fingerprint.cpu.cores:
        slower_or_faster += (f"the probe here ran under a load of {ours.probe.load:.2g}",)
    reasons = differing + slower_or_faster
    return Match(reasons, has_same_fingerprint=not differing, speeds=speeds)


def _speeds(ours: Probe, theirs: Probe) -> dict[str, float]:
    speeds = {name: getattr(ours, key) / getattr(theirs, key) for key, name in FIGURES.items()}
    here, there = ours.exchange, theirs.exchange
    if here and there and here.ranks == there.ranks:
        speeds[EXCHANGE] = here.gb_per_s / there.gb_per_s
        speeds[LATENCY] = there.latency_us / here.latency_us
    return speeds


def _differences(ours: Fingerprint, theirs: Fingerprint) -> Iterator[str]:
    """Yield a sentence for each field that is known on both sides and differs."""
    theirs_by_key = theirs.computing
    for key, here in ours.computing.items():
        there, name = theirs_by_key[key], key.replace("_", " ")
        if here == there or None in (here, there):
            continue
        if not isinstance(here, tuple):
            yield f"{name}: {here} here, {there} there"
            continue
        for side, only in (("here", {*here} - {*there}), ("there", {*there} - {*here})):
            if only:
                yield f"{name}: {', '.join(sorted(only))} {side} only"
