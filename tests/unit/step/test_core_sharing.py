"""Ranks on too few cores: ends worked out by hand, and the work that is done."""

import numpy as np
import pytest

from dlrm_sharded.step.core_sharing import CoreSharing
from dlrm_sharded.step.timeline import Operation, run_steps


def ends(begins, work, *, ranks_per_host=4, ranks_at_once=2.0):
    sharing = CoreSharing(ranks_per_host, ranks_at_once)
    return sharing.ends_ms(np.array(begins, float), np.array(work, float)).tolist()


def test_equal_ranks_take_as_many_times_as_long_as_cores_are_missing():
    assert ends([0, 0, 0, 0], [10, 10, 10, 10]) == [20, 20, 20, 20]


def test_a_long_rank_has_its_own_core_once_the_others_are_done():
    # three ranks do 6 ms of work each at 2/4 speed; the fourth then has 4 ms left
    assert ends([0, 0, 0, 0], [6, 6, 6, 10]) == [12, 12, 12, 16]


def test_ranks_slow_each_other_down_only_while_both_compute():
    # two ranks alone until 4; three at 2/3 speed until the first two have done 10, at 13
    assert ends([0, 0, 4], [10, 10, 10], ranks_per_host=3) == pytest.approx([13, 13, 17])


def test_hosts_do_not_share_cores_with_each_other():
    found = ends([0] * 4, [10, 10, 5, 0], ranks_per_host=2, ranks_at_once=1.0)
    assert found == [20, 20, 5, 0]


def test_enough_cores_change_nothing():
    assert ends([1, 2], [3, 4], ranks_per_host=2) == [4, 6]


def test_the_cores_do_no_more_work_than_they_can():
    rng = np.random.default_rng(0)
    for _ in range(50):
        begins, work = rng.uniform(0, 5, 8), rng.uniform(0, 5, 8)
        found = CoreSharing(8, 3.0).ends_ms(begins, work)
        assert (found >= begins + work - 1e-9).all()
        assert found.max() >= begins.min() + work.sum() / 3
        # at every end, the ranks that have ended had enough core time
        for end in found:
            assert work[found <= end].sum() <= 3 * (end - begins.min()) + 1e-9


def test_steps_share_cores_between_exchanges():
    def operation(name, times_ms, **keys):
        return Operation(name=name, part=name, times_ms=np.array(times_ms, float), **keys)

    operations = [
        operation("a", [1, 1]),
        operation("b", [3, 1]),
        operation("exchange", [5, 5], is_collective=True),
        operation("c", [2, 2]),
    ]
    alone = run_steps(operations, num_steps=1)
    shared = run_steps(operations, num_steps=1, sharing=CoreSharing(2, 1.0))
    assert alone.step_ms == 4 + 5 + 2
    assert shared.step_ms == pytest.approx((4 + 2) + 5 + 2 * 2)  # rank 1 ends at 4, rank 0 at 6
    assert shared.end_ms[0, 1].tolist() == pytest.approx([6, 4])
