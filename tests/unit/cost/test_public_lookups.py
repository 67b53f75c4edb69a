"""The prior of GPUs against published times: those that it was fitted to, and others."""

import dataclasses

import numpy as np
import pytest

from dlrm_sharded.cost.gpu_lookups import (
    LEFT_OUT_ERRORS,
    LOOKUP_ERROR,
)
from tests.unit.cost.public_lookups import (
    FITTED_LOOKUPS,
    FITTED_SOURCES,
    HELD_OUT,
    PublicLookup,
)

H100_SOURCES = ("recsys-examples", "torchrec 2365")


def mean_error(lookups: list[PublicLookup]) -> float:
    return float(np.mean([abs(lookup.error()) for lookup in lookups]))


@pytest.mark.parametrize("source", FITTED_SOURCES)
def test_each_source_is_predicted(source: str) -> None:
    """The stated errors are of fits without the source, so they are larger."""
    stated = LEFT_OUT_ERRORS["h100" if source in H100_SOURCES else "v100"]
    lookups = [lookup for lookup in FITTED_LOOKUPS if lookup.source == source]
    assert mean_error(lookups) < stated <= LOOKUP_ERROR


def test_long_bags_were_not_fitted_and_are_predicted() -> None:
    lookups = [lookup for lookup in HELD_OUT if lookup.source == "torchrec 2365, long bags"]
    assert len(lookups) == 7
    assert mean_error(lookups) < 0.1


def test_rows_in_fp16_are_predicted_faster() -> None:
    half = next(lookup for lookup in HELD_OUT if lookup.is_half)
    assert half.predicted_ms() < dataclasses.replace(half, is_half=False).predicted_ms()
