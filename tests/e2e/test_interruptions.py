"""Runs that are killed at random moments go on, and end as if they had not been interrupted."""

import pytest

from tests.soak import interruptions

pytestmark = pytest.mark.slow
NUM_INTERRUPTIONS = 3


def test_interrupted_runs_end_like_an_undisturbed_one(tmp_path):
    runs = interruptions.interrupt_runs(tmp_path, NUM_INTERRUPTIONS, per_run=3, seed=1)
    assert runs.faults == []
    assert len(runs.interruptions) == NUM_INTERRUPTIONS
    assert len({found.kind for found in runs.interruptions}) == NUM_INTERRUPTIONS
    assert "ended like the undisturbed one" in interruptions.table(runs)
