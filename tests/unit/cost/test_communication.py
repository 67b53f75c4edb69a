"""One model of exchanges for any number of ranks, on a synthetic network of hosts."""

import numpy as np
import pytest
from numpy.typing import NDArray

from dlrm_sharded.cost.communication import STATED
from dlrm_sharded.cost.exchange_terms import Hosts
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Exchange, Reduce
from dlrm_sharded.plans.plan import ShardingPlan
from dlrm_sharded.plans.task import Topology
from tests.unit.cost.plans import EXCHANGING, times_ms
from tests.unit.synthetic import tables_of, task_of, with_topology

Floats = NDArray[np.float64]


def two_hosts(*measured: str) -> Hosts:
    """2 hosts of 2 ranks, with 100 GB/s within and 10 GB/s between them."""
    topology = Topology(4, 1, 2, intra_host_bytes_per_s=100e9, inter_host_bytes_per_s=10e9)
    return Hosts.from_topology(topology, measured=measured)


def test_where_nothing_was_measured_the_stated_bandwidths_count() -> None:
    """By hand: of the busiest rank, 3 MB within its host and twice 3 MB to the other one."""
    exchange = Exchange(np.array([1e6, 3e6, 0, 0]), np.array([1.0, 2, 0, 0]), reduces=())
    for kind in ("fwd_comm", "bwd_comm", "input_dist"):
        times = STATED.exchange_ms(kind, exchange, two_hosts())
        np.testing.assert_allclose(times, [0.03 + 0.6] * 4)


def test_row_blocks_of_a_host_are_reduced_on_it_alone() -> None:
    """By hand: 1 MB to the other rank of the host; the ranks of the other host wait for nothing."""
    on_second_host = np.array([0.0, 0, 1, 1])
    exchange = Exchange(
        np.zeros(4), np.zeros(4), (Reduce(2, 1e6 * on_second_host, on_second_host, on_second_host),)
    )
    times = STATED.exchange_ms("fwd_comm", exchange, two_hosts())
    np.testing.assert_allclose(times, [0.0, 0.0, 0.01, 0.01])


def test_what_was_measured_does_not_change_with_what_is_stated(model: LearnedCostModel) -> None:
    """The fit knew no bandwidths, so those of a preset must not scale its times."""
    tables = tables_of(*[(1000, 128, 2.0)] * 4)
    silent = task_of(tables, 4, batch_size=4096, local_world_size=4, device="cuda")
    plan = ShardingPlan.from_ranks(silent, range(4))
    stated = with_topology(silent, intra_host_bytes_per_s=450e9, inter_host_bytes_per_s=50e9)
    expected, found = (times_ms(model.predict(plan, task), EXCHANGING) for task in (silent, stated))
    for stage, found_stage in zip(expected, found, strict=True):
        assert found_stage == pytest.approx(stage, rel=0.1)
