"""Changes of FBGEMM's kernels that make times of one version wrong for another."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelChange:
    """A change of the time of a direction under one fused optimizer.

    Args:
        since: first version of FBGEMM, major and minor, with the change.
        device: "cpu" or "cuda".
        direction: one of `compute.DIRECTIONS`.
        factor: time since the change over the time before it.
        source: what was measured.
    """

    since: tuple[int, int]
    device: str
    optimizer: str
    direction: str
    factor: float
    source: str


KERNEL_CHANGES = (
    KernelChange(
        since=(1, 9),
        device="cpu",
        optimizer="rowwise_adagrad",
        direction="backward",
        factor=1.4,
        source="57 to 63 ms with 1.9.0, 42 ms with 1.8.0, on 2 cores of an AMD EPYC with AVX-512; "
        "SGD took 4 to 5 ms with both",
    ),
)

UNNAMED_FBGEMM = "1.8.0"
"""Version of files that name none: all of them were written before the first known change."""


def changes_between(
    theirs: str | None, ours: str | None, *, device: str, optimizer: str | None
) -> dict[KernelChange, float]:
    """Return the changes between two versions of FBGEMM, each with its factor of our time.

    Args:
        theirs, ours: versions; None for `UNNAMED_FBGEMM`.
        optimizer: fused optimizer of both.
    """
    before, now = _major_minor(theirs), _major_minor(ours)
    return {
        change: change.factor if before < now else 1 / change.factor
        for change in KERNEL_CHANGES
        if (change.device, change.optimizer) == (device, optimizer)
        and min(before, now) < change.since <= max(before, now)
    }


def _major_minor(version: str | None) -> tuple[int, int]:
    """Return the first two numbers of a version; those of `UNNAMED_FBGEMM` if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version or "") or re.match(r"(\d+)\.(\d+)", UNNAMED_FBGEMM)
    assert found is not None
    return int(found[1]), int(found[2])
