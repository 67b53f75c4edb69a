"""The ranges of quantities that measured plans cover, outside of which a model extrapolates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dlrm_sharded.calibration.samples import Sample, workload_of_sample
from dlrm_sharded.cost.features import EXTENT, extent_of
from dlrm_sharded.cost.learned import LearnedCostModel


def fitted_ranges(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Return the lowest and highest value of each of `features.EXTENT`, and of the ranks.

    Plans of communication are left out of the former, as their tables are tiny.

    Args:
        samples: at least one of computation.
    """
    extents = [
        extent_of(workload_of_sample(sample)) for sample in samples if sample.kind == "computation"
    ]
    low, high = np.min(extents, axis=0)[:, 0], np.max(extents, axis=0)[:, 1]
    ranges = {name: (float(a), float(b)) for name, a, b in zip(EXTENT, low, high, strict=True)}
    sizes = [float(sample.world_size) for sample in samples]
    return {**ranges, "ranks": (min(sizes), max(sizes))}


def with_ranges_of(model: LearnedCostModel, samples: Sequence[Sample]) -> LearnedCostModel:
    """Return a model that was adapted to samples, in whose ranges lies what they have, too."""
    if not any(sample.kind == "computation" for sample in samples):
        return model
    others = fitted_ranges(samples)
    ranges = {
        name: (min(low, others[name][0]), max(high, others[name][1]))
        for name, (low, high) in model.ranges.items()
    }
    return dataclasses.replace(model, ranges=ranges)
