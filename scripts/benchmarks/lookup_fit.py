"""Fits the figures of lookups on GPUs to public measurements, and leaves out one source at a time.

A predicted time is a sum of the figures times amounts of work, so a fit needs these amounts only.
Errors are relative, and each source counts as much as any other, however many rows it has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from benchmarks.public_lookups import FITTED_LOOKUPS, PublicLookup
from dlrm_sharded.cost.gpu_lookups import LookupFigures

START = LookupFigures(
    sample_cycles=20.0,
    id_cycles=10.0,
    warp_cycles=5.0,
    line_cycles=3.4,
    read_factor=1.25,
    write_factor=1.25,
    update_factor=1.25,
    backward_id_cycles=20.0,
)
"""Figures that a fit keeps unless the rows contradict.

Bytes at the bandwidth that aiconfigurator calls usable, 80 %; the L2 cache between what is measured
on V100 and A100 (github.com/owensgroup/ml_perf_model: 23 and 15 B a cycle of a multiprocessor); the
other cycles are guesses of the right order, made in view of all the sources."""

PENALTY = 0.2
"""Relative error that a figure e times larger or smaller than at the start counts as."""

NAMES = tuple(field.name for field in dataclasses.fields(LookupFigures))
_IS_BANDWIDTH = np.array([name.endswith("_factor") for name in NAMES])


def fit_figures(lookups: Sequence[PublicLookup]) -> LookupFigures:
    """Fit the figures to lookups; no bandwidth is higher than the nominal one."""
    measured = np.array([lookup.measured_ms for lookup in lookups])
    fixed, amounts = _linear(lookups)
    sources = [lookup.source for lookup in lookups]
    weights = np.array([1.0 / sources.count(source) ** 0.5 for source in sources])
    start = np.array(dataclasses.astuple(START))

    def residuals(steps: np.ndarray) -> np.ndarray:
        predicted = fixed + amounts @ (start * np.exp(steps))
        return np.concatenate([weights * np.log(predicted / measured), PENALTY * steps])

    lowest = np.where(_IS_BANDWIDTH, -np.log(start), -10.0)
    steps = least_squares(residuals, np.zeros(len(start)), bounds=(lowest, 10.0)).x
    return LookupFigures(*(start * np.exp(steps)).tolist())


@functools.cache
def left_out(*sources: str) -> LookupFigures:
    """Fit the figures without some sources."""
    return fit_figures([lookup for lookup in FITTED_LOOKUPS if lookup.source not in sources])


def _linear(lookups: Sequence[PublicLookup]) -> tuple[np.ndarray, np.ndarray]:
    """Return the time [N] that no figure changes, and [N, F] the amounts of each figure."""
    nothing = LookupFigures(*[0.0] * len(NAMES))
    fixed = np.array([lookup.predicted_ms(nothing) for lookup in lookups])
    columns = [
        [lookup.predicted_ms(dataclasses.replace(nothing, **{name: 1.0})) for lookup in lookups]
        for name in NAMES
    ]
    return fixed, np.array(columns).T - fixed[:, None]
