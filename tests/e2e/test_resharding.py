"""Runs go on under other plans and numbers of ranks."""

import pytest

from tests.soak import resharding

pytestmark = pytest.mark.slow


def test_random_plans(tmp_path):
    changes = resharding.reshard(tmp_path, num_plans=1, seed=8, world_sizes=(2, 3))
    assert len(changes) == 4 * len(resharding.OPTIMIZERS)
    assert [change for change in changes if change.faults] == []
    assert any(change.converted for change in changes)
    assert f"{len(changes)} changes" in resharding.table(changes)


def test_a_run_under_one_plan_after_another(tmp_path):
    assert resharding.whole_run_faults(tmp_path, [(1, "dim"), (2, "search")]) == []
