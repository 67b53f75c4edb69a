"""The host's time of a step: MLPerf's model by reading, and others by what their hosts do."""

import pytest

from dlrm_sharded.step.host_time import (
    COMPILED_SHARE,
    LOOKUP_MS,
    HostTime,
    lookups_prior_ms,
    operators_prior_ms,
)


def prior(num_operators: int, num_lookups: int = 1, *, compiled: bool = False) -> HostTime:
    dense_ms = operators_prior_ms(num_operators, compiled=compiled)
    return HostTime(dense_ms, lookups_prior_ms(num_lookups))


def test_a_step_of_mlperfs_model_takes_seven_ms() -> None:
    assert prior(161).ms == pytest.approx(7.0, abs=0.01)


def test_the_host_does_more_for_more_operators_and_lookups() -> None:
    assert prior(161, 3).ms - prior(161).ms == pytest.approx(2 * LOOKUP_MS)
    dense_ms, half_ms = (prior(count).dense_ms for count in (200, 100))
    assert dense_ms == pytest.approx(2 * half_ms)
    assert prior(200, compiled=True).dense_ms == pytest.approx(COMPILED_SHARE * dense_ms)


def test_a_correction_is_of_all_parts() -> None:
    host = HostTime(2.0, 3.0)
    corrected = HostTime(2.0, 3.0, factor=1.5)
    assert corrected.ms == pytest.approx(1.5 * host.ms)
    assert corrected.error == host.error
