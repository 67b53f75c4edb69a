"""The prior of GPUs against published times: those that it was fitted to, and others."""

import numpy as np
import pytest

from dlrm_sharded.cost.gpu_lookups import LEFT_OUT_ERRORS, LOOKUP_ERROR
from tests.unit.cost.public_lookups import FITTED_LOOKUPS, FITTED_SOURCES, PublicLookup

H100_SOURCES = ("recsys-examples", "torchrec 2365")


def mean_error(lookups: list[PublicLookup]) -> float:
    return float(np.mean([abs(lookup.error()) for lookup in lookups]))


@pytest.mark.parametrize("source", FITTED_SOURCES)
def test_each_source_is_predicted(source: str) -> None:
    """The stated errors are of fits without the source, so they are larger."""
    stated = LEFT_OUT_ERRORS["h100" if source in H100_SOURCES else "v100"]
    lookups = [lookup for lookup in FITTED_LOOKUPS if lookup.source == source]
    assert mean_error(lookups) < stated <= LOOKUP_ERROR
