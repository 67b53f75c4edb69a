"""Runs that are killed at random moments go on, and end as if they had not been interrupted."""

import pytest

from tests.soak.interruptions import interrupt_runs

pytestmark = pytest.mark.slow
NUM_INTERRUPTIONS = 2


def test_interrupted_runs_end_like_an_undisturbed_one(tmp_path):
    """A rank is killed while a checkpoint is written, then the launcher gets SIGTERM."""
    found = interrupt_runs(tmp_path, NUM_INTERRUPTIONS, per_run=2, seed=2)
    assert found.faults == []
    assert {kind for kind, _ in found.interruptions} == {"one rank", "SIGTERM"}
