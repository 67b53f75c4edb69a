"""One model of exchanges for any number of ranks, on a made-up network of hosts."""

import numpy as np
import pytest
from numpy.typing import NDArray

from dlrm_sharded.calibration.fit_alone import fit_communication, fit_nonnegative
from dlrm_sharded.cost.communication import UNMEASURED, CommunicationModel, Hosts, with_stated
from dlrm_sharded.cost.learned import LearnedCostModel
from dlrm_sharded.cost.workload import Exchange, Reduce, Workload
from dlrm_sharded.plans.plan import whole_tables
from dlrm_sharded.plans.tables import NUM_REUSE_BINS
from dlrm_sharded.plans.task import Topology
from tests.unit.cost.hardware import NOISE, all_to_all_ms
from tests.unit.cost.plans import EXCHANGING, times_ms
from tests.unit.made_up import tables_of, task_of, with_topology

RANKS_PER_HOST = 8
FITTED_SIZES, SIZES = (4, 8, 16, 32), (4, 8, 16, 32, 128)
NUM_PLANS = 150
BATCH_PER_RANK = 1024
PEER_BYTES = 4.0 * BATCH_PER_RANK
"""That one column sends to one rank."""

Floats = NDArray[np.float64]


def hosts(world_size: int) -> Hosts:
    return Hosts(world_size, min(world_size, RANKS_PER_HOST))


def workload(columns: Floats, ranks_per_host: int, group_size: int = 1) -> Workload:
    """One shard with each rank's columns; all of them one id a sample."""
    used = np.flatnonzero(columns)
    one = np.ones(len(used))
    batch_size = BATCH_PER_RANK * len(columns)
    return Workload(
        world_size=len(columns),
        ranks_per_host=ranks_per_host,
        batch_size=batch_size,
        rank=used,
        group_size=np.full(len(used), group_size),
        num_rows=64.0 * one,
        num_cols=columns[used],
        num_ids=batch_size * one,
        reuse_histogram=np.zeros((len(used), NUM_REUSE_BINS)),
    )


def plans(world_size: int, seed: int) -> list[Floats]:
    """[W], columns by rank: about even at one extreme, nearly all on one rank at the other."""
    rng = np.random.default_rng([seed, world_size])
    found = []
    for _ in range(NUM_PLANS):
        mean = 16 * 128 ** rng.random()
        share = rng.dirichlet(np.full(world_size, 10 ** rng.uniform(-1.0, 2.0)))
        found.append(np.maximum(mean * world_size * share, 1e-3))
    return found


def true_ms(columns: Floats) -> Floats:
    return all_to_all_ms(columns * PEER_BYTES, min(len(columns), RANKS_PER_HOST))


def fit(world_sizes: tuple[int, ...], seed: int = 0) -> CommunicationModel:
    """To measurements of all three exchanges, with noise."""
    rng = np.random.default_rng(seed)
    columns = [plan for size in world_sizes for plan in plans(size, seed)]
    times = [
        true_ms(plan) * np.exp(NOISE * rng.standard_normal((3, len(plan)))) for plan in columns
    ]
    at = [hosts(len(plan)) for plan in columns]
    workloads = [workload(plan, h.ranks_per_host) for plan, h in zip(columns, at, strict=True)]
    return fit_communication(workloads, times, at)


def predict(model: CommunicationModel, kind: str, of: Workload, at: Hosts) -> Floats:
    return model.exchange_ms(kind, of.exchange(for_ids=kind == "input_dist"), at)


@pytest.fixture(scope="module")
def network() -> CommunicationModel:
    return fit(FITTED_SIZES)


@pytest.mark.parametrize("kind", ["fwd_comm", "bwd_comm"])
@pytest.mark.parametrize("world_size", SIZES)
def test_one_model_predicts_any_number_of_ranks(
    network: CommunicationModel, world_size: int, kind: str
) -> None:
    """Also those that were not measured: 128 ranks, on 16 hosts."""
    at = hosts(world_size)
    errors = [
        np.abs(predict(network, kind, workload(plan, at.ranks_per_host), at) / true_ms(plan) - 1)
        for plan in plans(world_size, seed=1)
    ]
    mape = 100 * np.mean(errors)
    assert mape <= 4.0


def test_what_one_host_cannot_tell_is_not_free() -> None:
    """Fitted within a host, there is no measurement of what lies between hosts."""
    one_host = with_stated(fit((4, 8)), measured=["intra"])
    columns = np.full(16, 256.0)
    together, apart = (
        predict(one_host, "fwd_comm", workload(columns, at.ranks_per_host), at).max()
        for at in (Hosts(16, 16), Hosts(16, 8))
    )
    assert apart >= together * 0.99


def two_hosts(*measured: str) -> Hosts:
    """2 hosts of 2 ranks, with 100 GB/s within and 10 GB/s between them."""
    topology = Topology(4, 1, 2, intra_host_bytes_per_s=100e9, inter_host_bytes_per_s=10e9)
    return Hosts.from_topology(topology, measured=measured)


def test_where_nothing_was_measured_the_stated_bandwidths_count() -> None:
    """By hand: of the busiest rank, 3 MB within its host and twice 3 MB to the other one."""
    exchange = Exchange(np.array([1e6, 3e6, 0, 0]), np.array([1.0, 2, 0, 0]), reduces=())
    stated = with_stated(UNMEASURED, measured=[])
    for kind in ("fwd_comm", "bwd_comm", "input_dist"):
        times = stated.exchange_ms(kind, exchange, two_hosts())
        np.testing.assert_allclose(times, [0.03 + 0.6] * 4)
        assert not UNMEASURED.exchange_ms(kind, exchange, two_hosts()).any()


def test_row_blocks_of_a_host_are_reduced_on_it_alone() -> None:
    """By hand: 1 MB to the other rank of the host; the ranks of the other host wait for nothing."""
    on_second_host = np.array([0.0, 0, 1, 1])
    exchange = Exchange(
        np.zeros(4), np.zeros(4), (Reduce(2, 1e6 * on_second_host, on_second_host),)
    )
    times = with_stated(UNMEASURED, measured=[]).exchange_ms("fwd_comm", exchange, two_hosts())
    np.testing.assert_allclose(times, [0.0, 0.0, 0.01, 0.01])


def test_what_was_measured_does_not_change_with_what_is_stated(model: LearnedCostModel) -> None:
    """The fit knew no bandwidths, so those of a preset must not scale its times."""
    tables = tables_of(*[(1000, 128, 2.0)] * 4)
    silent = task_of(tables, 4, batch_size=4096, local_world_size=4, device="cuda")
    plan = whole_tables(silent, range(4))
    stated = with_topology(silent, intra_host_bytes_per_s=450e9, inter_host_bytes_per_s=50e9)
    expected, found = (times_ms(model.predict(plan, task), EXCHANGING) for task in (silent, stated))
    for stage, found_stage in zip(expected, found, strict=True):
        assert found_stage == pytest.approx(stage, rel=0.1)


def test_finds_the_weights_in_spite_of_disturbances() -> None:
    rng = np.random.default_rng(0)
    terms = 10 ** rng.uniform(-1, 1, (400, 4))
    weights = np.array([0.5, 0.0, 2.0, 1.0])
    times = terms @ weights * np.exp(0.01 * rng.standard_normal(400))
    times[::20] *= 5.0
    found = fit_nonnegative(terms, times)
    np.testing.assert_allclose(found, weights, atol=0.03)
    plain = np.linalg.lstsq(terms / times[:, None], np.ones(400))[0]
    assert np.abs(found - weights).max() < np.abs(plain - weights).max() / 3
